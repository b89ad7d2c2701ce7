"""A model of each format with a real artifact between both programs: bf16-serve serves what bf16-convert wrote.

The responses are compared with the outputs of the source itself.
"""

from pathlib import Path
from typing import Any

import exportedfiles
import numpy as np
import onnx
import pytest
import torch
import tritonclient.grpc as triton
from architectures import Cnn, seeded
from converting import process
from scriptedmodels import Deciding, save
from serverprocess import Serve, ServerProcess
from waiting import until

import graphs
from bf16kit.converter.cli import run

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")  # torch.jit's own


def convert(source: Path, target: Path, *options: str) -> None:
    assert run(["checkpoint", str(source), "--out", str(target), "--no-report", *options]) == 0


def distance(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def infos(server: ServerProcess) -> list[str]:
    return [line for line in server.get("/metrics")[1].splitlines() if line.startswith("bf16kit_model_info{")]


@pytest.mark.long
def test_an_onnx_model_gives_its_sources_outputs_and_live_drift_is_measured(tmp_path: Path, serve: Serve) -> None:
    source, a, b = tmp_path / "m.onnx", graphs.values(64, 64, seed=1), graphs.values(64, 10, seed=2)
    text = "(float[batch,64] x) => (float[batch,10] y) { h = MatMul(x, a) r = Relu(h) y = MatMul(r, b) }"
    onnx.save(graphs.parsed(text, a=a, b=b), source)
    process("checkpoint", source, "--out", tmp_path / "models" / "m" / "1").published()
    (tmp_path / "models" / "m" / "serving.yaml").write_text("shadow: {rate: 1.0, max_per_second: 100}\n")
    server = serve("--repository", tmp_path / "models", "--device", "cpu").wait_ready()
    assert "golden samples within budget" in server.log
    x = np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32)
    drift = distance(server.infer("m", {"x": x})["y"], np.maximum(x @ a, 0) @ b)
    assert 0 < drift < 1e-2
    until(lambda: server.of_model("drift_relative_l2_count", "m", output="y") == 6, 60, "six samples measured")
    assert server.of_model("drift_relative_l2_sum", "m", output="y") / 6 == pytest.approx(drift, rel=0.5)
    assert server.of_model("drift_baseline", "m", metric="relative_l2", output="y") > 0


@pytest.mark.long
def test_a_torchscript_model_with_a_branch_on_its_values_is_served_on_both_branches(
    tmp_path: Path, serve: Serve
) -> None:
    source = save(tmp_path / "m.pt", Deciding(), torch.ones(2, 16))
    convert(source, tmp_path / "models" / "model" / "1", "--input", "x:float32:batch,16", "--trust-code")
    server = serve("--repository", tmp_path / "models", "--device", "cpu").wait_ready()
    itself: Any = torch.jit.load(str(source))  # type: ignore[no-untyped-call]  # torch's own
    random = np.random.default_rng(1).standard_normal((6, 16)).astype(np.float32)
    for x in (np.abs(random), -np.abs(random)):
        with torch.no_grad():
            expected = itself(torch.from_numpy(x)).numpy()
        assert 0 < distance(server.infer("model", {"x": x})["output"], expected) < 1e-2
    (info,) = infos(server)
    assert 'profile="torchscript"' in info
    assert 'accumulation="fp32"' in info


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository: ``model`` has the profile pt2; ``both`` also has cpu, and its ``serving.yaml`` names pt2."""
    directory = tmp_path_factory.mktemp("exported")
    source, models = directory / "m.pt2", directory / "models"
    source.write_bytes(exportedfiles.exported(seeded(Cnn()), torch.ones(2, 3, 16, 16)))
    convert(source, models / "model" / "1", "--trust-code", "--format", "pt2")
    both = ("--format", "pt2", "--format", "onnx", "--profile", "cpu")
    convert(source, models / "both" / "1", "--trust-code", *both)
    (models / "both" / "serving.yaml").write_text("profile: pt2\n")
    return models


@pytest.mark.long
def test_a_pt2_model_is_served_with_outputs_close_to_torch(exported: Path, serve: Serve) -> None:
    server = serve("--repository", exported, "--device", "cpu").wait_ready()
    x = np.random.default_rng(1).standard_normal((6, 3, 16, 16)).astype(np.float32)
    with torch.inference_mode():
        expected = seeded(Cnn()).eval()(torch.from_numpy(x)).numpy()
    for model in ("model", "both"):
        assert 0 < distance(server.infer(model, {"x": x})["output"], expected) < 1e-2
        with triton.InferenceServerClient(server.target) as client:
            assert client.get_model_metadata(model).platform == "pytorch_export"
            assert client.get_model_config(model).config.backend == "pytorch"
    assert len(infos(server)) == 2
    assert all('profile="pt2"' in line and 'accumulation="fp32"' in line for line in infos(server))
