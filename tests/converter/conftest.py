"""Fixtures: small checkpoints, each converted once for all tests that only read the result."""

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from converting import MLP, Cli, Outcome
from secondjudge import judging_conversions

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.cli import run

Factory = pytest.TempPathFactory


@pytest.fixture(autouse=True, scope="session")
def _a_second_judge() -> Iterator[None]:
    """Let a second judge check every artifact that the tests convert."""
    with judging_conversions():
        yield


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs one command line in this process."""

    def call(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Outcome(code, said.out, said.err)

    return call


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return the ``--out`` of a test's conversion, ``…/repository/m/1``. None of its directories exist yet."""
    return tmp_path / "repository" / "m" / "1"


def converted(factory: Factory, name: str, *arguments: str | Path) -> Artifact:
    """Convert with ``arguments`` and return the published artifact."""
    path = factory.mktemp("repository") / name / "1"
    assert run(["checkpoint", *map(str, arguments), "--out", str(path)]) == 0
    return Artifact.open(path)


@pytest.fixture(scope="session")
def mlp_file(tmp_path_factory: Factory) -> Path:
    """Return the file of a torch state dict of ``architectures.Mlp``."""
    from architectures import Mlp, save

    return save(tmp_path_factory.mktemp("mlp") / "mlp.pt", Mlp())


@pytest.fixture(scope="session")
def mlp(tmp_path_factory: Factory, mlp_file: Path) -> Artifact:
    """Return ``mlp_file`` converted to every profile, and to TorchScript."""
    return converted(tmp_path_factory, "mlp", mlp_file, *MLP, "--format", "onnx", "--format", "torchscript")


@pytest.fixture(scope="session")
def onnx_file(tmp_path_factory: Factory) -> Path:
    """Return an fp32 ONNX file of two layers: the source that converts fastest."""
    path = tmp_path_factory.mktemp("onnx") / "mlp.onnx"
    onnx.save(graphs.mlp(), path)
    return path


@pytest.fixture(scope="session")
def small(tmp_path_factory: Factory, onnx_file: Path) -> Artifact:
    """Return ``onnx_file`` converted with all defaults: three ONNX profiles, residual, report."""
    return converted(tmp_path_factory, "small", onnx_file)
