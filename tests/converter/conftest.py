"""Small checkpoints, converted once for all tests that only look at the result."""

from __future__ import annotations

import gc
from pathlib import Path

import onnx
import pytest
from converting import MLP, Cli, Outcome

import graphs
from bf16kit.artifact import Artifact
from converter.cli import run

Factory = pytest.TempPathFactory


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_is_new() -> None:
    """A conversion collects garbage between its steps, which takes 0.2 s among the objects of torch and pytest."""
    gc.freeze()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs one command line in this process."""

    def call(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Outcome(code, said.out, said.err)

    return call


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where a test's conversion goes: ``…/repository/m/1``, of which nothing exists yet."""
    return tmp_path / "repository" / "m" / "1"


def converted(factory: Factory, name: str, *arguments: str | Path) -> Artifact:
    """What converting with ``arguments`` published."""
    path = factory.mktemp("repository") / name / "1"
    assert run(["checkpoint", *map(str, arguments), "--out", str(path)]) == 0
    return Artifact.open(path)


@pytest.fixture(scope="session")
def mlp_file(tmp_path_factory: Factory) -> Path:
    """A torch state dict of ``architectures.Mlp``."""
    from architectures import Mlp, save

    return save(tmp_path_factory.mktemp("mlp") / "mlp.pt", Mlp())


@pytest.fixture(scope="session")
def mlp(tmp_path_factory: Factory, mlp_file: Path) -> Artifact:
    """``mlp_file`` with all defaults: every profile, residual, report."""
    return converted(tmp_path_factory, "mlp", mlp_file, *MLP)


@pytest.fixture(scope="session")
def onnx_file(tmp_path_factory: Factory) -> Path:
    """An fp32 ONNX file of two layers: the source that converts fastest."""
    path = tmp_path_factory.mktemp("onnx") / "mlp.onnx"
    onnx.save(graphs.mlp(), path)
    return path


@pytest.fixture(scope="session")
def small(tmp_path_factory: Factory, onnx_file: Path) -> Artifact:
    """``onnx_file`` with all defaults: two ONNX profiles, residual, report."""
    return converted(tmp_path_factory, "small", onnx_file)
