"""Checkpoints that Lightning wrote in each precision: converted, run, and compared with Lightning's own outputs."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.cli import run
from bf16kit.runtime.loading import load, load_reference

pytestmark = pytest.mark.sources

HERE = Path(__file__).parent
_NAMES = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "32-true+ema")


@pytest.fixture(scope="module")
def python(environment: Callable[[str], Path]) -> Path:
    return environment("lightning")


@pytest.fixture(scope="module")
def trained(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory that ``lightningtrained.py`` filled."""
    directory = tmp_path_factory.mktemp("lightning")
    done = subprocess.run(
        [str(python), str(HERE / "lightningtrained.py"), str(directory)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return directory


def _check(target: Path, trained: Path, name: str) -> None:
    """Assert that the artifact gives Lightning's outputs: the fp32 reference as fp32, bf16 within its rounding."""
    artifact, answers = Artifact.open(target), np.load(trained / f"{name}.npz")
    feed, expected = {"x": answers["x"]}, answers["logits"]
    np.testing.assert_allclose(load_reference(artifact).run(feed)["output"], expected, atol=1e-5)
    scale = float(np.linalg.norm(expected))
    for profile in ("cpu", "torchscript"):
        answered = load(artifact, profile).run(feed)["output"]
        assert np.linalg.norm(answered - expected) / scale < 1.5e-2, profile


@pytest.mark.parametrize("name", _NAMES)
def test_the_plain_module_gives_lightnings_outputs_without_lightning(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\ndef plain(width):\n"
        "    return nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 4))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path, target = trained / f"{name}.ckpt", tmp_path / "repository" / "m" / "1"
    arguments = ["--model", "net:plain", "--input", "x:float32:batch,16", "--format", "onnx", "--format", "torchscript"]
    assert run(["checkpoint", str(path), *arguments, "--out", str(target)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Lightning 2.6.6, epoch 1, global step 8" in said
    assert ("under 'current_model_state'; --weights KEY takes those" in said) == name.endswith("+ema")
    assert "hyper-parameters of the file passed to --model: width=32" in said
    assert "hyper-parameters of the file that --model does not take: rate" in said
    _check(target, trained, name)
    _check_restored(path, target, tmp_path / "restored.safetensors")


def _check_restored(path: Path, target: Path, out: Path) -> None:
    from safetensors.torch import load_file

    assert run(["restore", str(target), "--out", str(out)]) == 0
    state, restored = torch.load(path, weights_only=True)["state_dict"], load_file(out)
    assert restored.keys() == state.keys()
    for tensor_name, tensor in state.items():
        assert torch.equal(restored[tensor_name], tensor), tensor_name


def test_the_lightning_module_is_the_model_if_lightning_is_installed(
    python: Path, trained: Path, tmp_path: Path
) -> None:
    target = tmp_path / "repository" / "m" / "1"
    command = [
        str(python),
        "-m",
        "bf16kit.converter.cli",
        "checkpoint",
        str(trained / "bf16-mixed.ckpt"),
        "--out",
        str(target),
    ]
    command += ["--model", "lightningtrained:Lit", "--input", "x:float32:batch,16"]
    command += ["--format", "onnx", "--format", "torchscript"]
    path = os.pathsep.join(filter(None, [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert "width=32, rate=0.01" in done.stdout
    _check(target, trained, "bf16-mixed")
