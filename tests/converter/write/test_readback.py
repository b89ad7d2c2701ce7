"""Written files are read back and compared with the source before anything is published."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from converting import Cli
from safetensors.torch import load_file

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.write.readback import misrounded
from bf16kit.converter.write.weights import Rounding
from bf16kit.numerics.rounding import LOWEST, to_bf16

BITS = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32)
TIES = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
EDGES = np.array([0, 1, 0x8000, 0x8001, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0x7FC00000, 0x007F8000], np.uint32)
VALUES = np.concatenate([BITS, TIES, EDGES, EDGES | np.uint32(0x80000000)]).view(np.float32)


@pytest.mark.parametrize("rounding", [Rounding(), Rounding("flush"), Rounding(saturate=True)])
def test_the_check_accepts_correct_rounding_of_any_bits(rounding: Rounding) -> None:
    stored = to_bf16(VALUES, subnormals=rounding.subnormals, saturate=rounding.saturate)
    assert not misrounded(VALUES, stored, rounding).any()


def test_the_check_rejects_all_values_but_the_nearest() -> None:
    values = VALUES[np.isfinite(VALUES)]
    stored = to_bf16(values).view(np.uint16)
    for other in (stored + np.uint16(1), stored - np.uint16(1)):
        assert misrounded(values, other.view(ml_dtypes.bfloat16), Rounding()).all()
    truncated = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    wrong = misrounded(values, truncated.view(ml_dtypes.bfloat16), Rounding())
    np.testing.assert_array_equal(wrong, truncated != stored)
    lost = np.array([-1.5, 2.0, -0.0], ml_dtypes.bfloat16)  # two signs and a NaN
    assert misrounded(np.array([1.5, np.nan, 0.0], np.float32), lost, Rounding()).all()


def test_a_folded_scale_is_multiplied_in_before_rounding() -> None:
    values = np.random.default_rng(1).standard_normal((64, 32)).astype(np.float32)
    scale = np.random.default_rng(2).standard_normal((64, 1))
    stored = to_bf16((values.astype(np.float64) * scale).astype(np.float32))
    assert not misrounded(values, stored, Rounding(), scale.astype(np.float32)).any()
    assert misrounded(values, stored, Rounding(), (scale * (1 + 1e-3)).astype(np.float32)).mean() > 0.1


@pytest.mark.long
@pytest.mark.parametrize("format", ["onnx", "safetensors"])
def test_a_correct_conversion_that_clamps_a_mask_passes(cli: Cli, target: Path, tmp_path: Path, format: str) -> None:
    """Rounding the mask without clamping it would give infinity."""
    lowest = float(np.finfo(np.float32).min)
    onnx.save(graphs.causal(lowest), tmp_path / "causal.onnx")
    cli("checkpoint", tmp_path / "causal.onnx", "--out", target, "--format", format, "--no-report").published()
    if format == "onnx":
        mask = Artifact.open(target).tensor("mask")
    else:
        mask = load_file(target / "model.safetensors")["mask"].float().numpy()
    assert float(mask.astype(np.float32).min()) == LOWEST
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert load_file(tmp_path / "fp32.safetensors")["mask"].numpy().min() == lowest
