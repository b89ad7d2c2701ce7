"""Checkpoints in bf16, fp16 and fp64: the size of their artifacts, what is restored, and the notes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import Mlp, seeded
from converting import Cli
from safetensors.torch import save_file

from bf16kit.artifact.artifact import Artifact
from bf16kit.numerics.tensors import BY_NAME

ARGUMENTS = ("--model", "architectures:Mlp", "--model-args", '{"width": 64, "hidden": 1024, "classes": 128}')
INPUT = ("--input", "x:float32:batch,64", "--format", "onnx", "--profile", "cpu", "--no-report")


def saved(path: Path, dtype: str, **changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """Save the state dict of a module of 0.8 MB in fp32 at ``dtype``, and return it."""
    state = seeded(Mlp(64, 1024, 128)).state_dict()
    state = {name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()} | changed
    save_file(state, path)
    return state


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "bound", "restored", "said"),
    [
        ("float32", 1.03, "float32", ""),
        ("bfloat16", 1.03, "bfloat16", ""),
        ("float16", 1.25, "float16", "4 of the checkpoint's tensors are fp16: bf16 has 8 of their 11 bits"),
        ("float64", 0.52, "float32", "4 of the checkpoint's tensors are fp64: the model computes in fp32"),
    ],
)
def test_the_size_of_an_artifact_and_the_checkpoint_restored_from_it(
    cli: Cli, tmp_path: Path, target: Path, dtype: str, bound: float, restored: str, said: str
) -> None:
    """An fp16 value takes 2 bytes as bf16 and 3 more bits, plus ties: 1.21 times its size at best."""
    state = saved(tmp_path / "model.safetensors", dtype)
    done = cli("checkpoint", tmp_path / "model.safetensors", "--out", target, *ARGUMENTS, *INPUT).published()
    assert said in done.out
    assert ("fp16" in done.out, "fp64" in done.out) == (dtype == "float16", dtype == "float64")
    artifact = Artifact.open(target)
    weights = sum(artifact.manifest.files[name].bytes for name in ("weights.bf16", "weights.fp32", "residual.bin"))
    assert weights / artifact.manifest.source.bytes <= bound
    assert artifact.manifest.schema_version == 7
    bits = np.dtype(f"u{BY_NAME[restored].numpy.itemsize}")
    for name, array in artifact.checkpoint_tensors():
        expected = state[name].to(getattr(torch, restored)).view(getattr(torch, f"int{8 * bits.itemsize}"))
        assert array.dtype.name == restored
        np.testing.assert_array_equal(array.view(bits), expected.numpy().view(bits))
    if dtype == "bfloat16":
        drift = artifact.manifest.drift["cpu"].outputs["output"]["relative_l2"]
        assert drift["worst"] < 1e-5  # the weights are unchanged; only the order of sums differs


def test_a_value_beyond_fp32_is_rejected_with_its_tensor(cli: Cli, tmp_path: Path, target: Path) -> None:
    large = torch.zeros(128, dtype=torch.float64)
    large[3] = 1e39
    saved(tmp_path / "model.safetensors", "float64", **{"down.bias": large})
    said = "tensor 'down.bias' is fp64 and holds a number above fp32's largest"
    cli("checkpoint", tmp_path / "model.safetensors", "--out", target, *ARGUMENTS, *INPUT).refused(2, said)
