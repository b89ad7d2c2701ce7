"""``--format`` and ``--profile``: exactly the requested files are written."""

from __future__ import annotations

from pathlib import Path

import pytest
from converting import MLP, Cli

from bf16kit.artifact.artifact import Artifact
from bf16kit.runtime.loading import load_reference

_ALWAYS = {
    "golden.safetensors",
    "measurements.json",
    "reference.onnx",
    "report.html",
    "residual.bin",
    "weights.bf16",
    "weights.fp32",
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        (["--profile", "cpu"], {"cpu.onnx"}),
        (["--profile", "cuda"], {"cuda.onnx"}),
        (["--profile", "cpu", "--profile", "cuda", "--profile", "cpu"], {"cpu.onnx", "cuda.onnx"}),
        (["--format", "onnx"], {"cpu.onnx", "cpu-bf16.onnx", "cuda.onnx"}),
    ],
)
def test_the_requested_onnx_profiles_are_written(
    cli: Cli, onnx_file: Path, target: Path, arguments: list[str], more: set[str]
) -> None:
    cli("checkpoint", onnx_file, "--out", target, *arguments).published()
    assert set(Artifact.open(target).manifest.files) == _ALWAYS | more
    assert {path.name for path in target.iterdir()} == _ALWAYS | more | {"manifest.json"}


@pytest.mark.long
def test_torchscript_alone_keeps_the_weights_for_its_reference(cli: Cli, mlp_file: Path, target: Path) -> None:
    cli("checkpoint", mlp_file, "--out", target, *MLP, "--format", "torchscript").published()
    artifact = Artifact.open(target)
    assert list(artifact.manifest.profiles) == ["torchscript"]
    assert load_reference(artifact).info.profile == "reference"
    assert {path.name for path in target.iterdir()} == _ALWAYS | {"model.torchscript.pt", "manifest.json"}
    cli("verify", target).published()


@pytest.mark.long
def test_torchscript_without_a_residual_has_no_onnx_file(cli: Cli, mlp_file: Path, target: Path) -> None:
    cli("checkpoint", mlp_file, "--out", target, *MLP, "--format", "torchscript", "--no-residual").published()
    assert not list(target.glob("*.onnx"))
    cli("verify", target).published()
