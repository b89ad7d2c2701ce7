"""A torch.export program end to end: converted with ``--format pt2``, served, and compared with torch's outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import exportedfiles as files
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from architectures import Cnn, seeded

from bf16kit.artifact.artifact import Artifact
from converter.cli import run

Serve = Callable[..., Any]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository: ``model`` has the profile pt2; ``both`` also has cpu, and its ``serving.yaml`` names pt2."""
    directory = tmp_path_factory.mktemp("exported")
    source = directory / "m.pt2"
    source.write_bytes(files.exported(seeded(Cnn()), torch.ones(2, 3, 16, 16)))
    models = directory / "models"
    both = ["--format", "pt2", "--format", "onnx", "--profile", "cpu"]
    for name, given in (("model", ["--format", "pt2"]), ("both", both)):
        assert (
            run(["checkpoint", str(source), "--out", str(models / name / "1"), "--no-report", "--trust-code", *given])
            == 0
        )
    (models / "both" / "serving.yaml").write_text("profile: pt2\n")
    return models


@pytest.mark.long
def test_a_pt2_model_is_served_with_outputs_close_to_torch(repository: Path, serve: Serve) -> None:
    server = serve("--repository", str(repository), "--device", "cpu").wait_ready()
    x = np.random.default_rng(1).standard_normal((6, 3, 16, 16)).astype(np.float32)
    with torch.inference_mode():
        expected = seeded(Cnn()).eval()(torch.from_numpy(x)).numpy()
    with triton.InferenceServerClient(server.target) as client:
        for model in ("model", "both"):
            tensor = triton.InferInput("x", list(x.shape), "FP32")
            tensor.set_data_from_numpy(x)
            answer = client.infer(model, [tensor]).as_numpy("output")
            assert 0 < np.linalg.norm(answer - expected) / np.linalg.norm(expected) < 1e-2
            assert client.get_model_metadata(model).platform == "pytorch_export"
            assert client.get_model_config(model).config.backend == "pytorch"
    info = [line for line in server.get("/metrics")[1].splitlines() if line.startswith("bf16kit_model_info{")]
    assert len(info) == 2
    assert all('profile="pt2"' in line and 'accumulation="fp32"' in line for line in info)


def test_a_pt2_model_is_measured_in_both_arithmetics_and_verifies(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = Artifact.open(repository / "model" / "1").manifest
    assert manifest.schema_version == 7
    assert manifest.profiles["pt2"].note.startswith("when verified: run in both arithmetics")
    assert manifest.drift["pt2"].outputs["output"]["relative_l2"]["mean"] > 0
    assert run(["verify", str(repository / "model" / "1")]) == 0
    assert "pt2" in capsys.readouterr().out


@pytest.mark.long
def test_the_same_conversion_gives_the_same_bytes(repository: Path, tmp_path: Path) -> None:
    source = repository.parent / "m.pt2"
    target = tmp_path / "model" / "1"
    arguments = ["--no-report", "--trust-code", "--format", "pt2"]
    assert run(["checkpoint", str(source), "--out", str(target), *arguments]) == 0
    for name in ("model.pt2", "manifest.json"):
        assert (target / name).read_bytes() == (repository / "model" / "1" / name).read_bytes()


@pytest.mark.long
def test_pt2_is_written_only_on_request(repository: Path, tmp_path: Path) -> None:
    target = tmp_path / "model" / "1"
    assert (
        run(["checkpoint", str(repository.parent / "m.pt2"), "--out", str(target), "--no-report", "--trust-code"]) == 0
    )
    assert "pt2" not in Artifact.open(target).manifest.profiles


def test_a_source_that_is_not_a_torch_module_cannot_be_written_as_pt2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import onnx

    import graphs

    onnx.save(graphs.mlp(), tmp_path / "m.onnx")
    arguments = ["--out", str(tmp_path / "m" / "1"), "--format", "pt2"]
    assert run(["checkpoint", str(tmp_path / "m.onnx"), *arguments]) == 3
    assert "--format pt2: this format is made from a torch module" in capsys.readouterr().err
