from pathlib import Path

import numpy as np
import onnx
import pytest
from lowered import assert_same_tensors, lower
from onnx import ModelProto, helper

import graphs
from bf16kit.messages.errors import RangeError
from bf16kit.numerics.rounding import LOWEST

_LOWEST = np.finfo(np.float32).min


def _masked_softmax(mask: float) -> ModelProto:
    """Return softmax(x·w + (keep ? 0 : mask)). In a row that keeps nothing, −inf everywhere would give NaN."""
    return graphs.parsed(
        """(float[batch, 16] x, bool[batch, 16] keep) => (float[batch, 16] y) {
            scores = MatMul (x, w) penalty = Where (keep, zero, mask) masked = Add (scores, penalty)
            y = Softmax <axis = -1> (masked)
        }""",
        w=graphs.values(16, 16),
        zero=np.array(0, np.float32),
        mask=np.array(mask, np.float32),
    )


def _feeds() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    keep = np.ones((3, 16), np.bool_)
    keep[1, 8:] = False
    keep[2] = False
    return {"x": graphs.values(3, 16, seed=5), "keep": keep}


@pytest.mark.parametrize("mask", [float(_LOWEST), -3.4e38])
def test_a_mask_that_would_overflow_is_clamped_and_the_output_stays_finite(mask: float, tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", _masked_softmax(mask))
    feeds = _feeds()
    source = made.run_source(feeds)["y"]
    for answer in (made.run_cpu(feeds)["y"], made.run_emulated(feeds)["y"]):
        assert np.isfinite(answer).all()
        np.testing.assert_allclose(answer, source, atol=4e-3)
    np.testing.assert_array_equal(made.run_reference(feeds)["y"], source)


def test_a_mask_of_minus_infinity_is_not_clamped(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", _masked_softmax(-np.inf))
    feeds = _feeds()
    assert made.prepared.clamped == frozenset()
    assert np.isnan(made.run_source(feeds)["y"][2]).all()
    assert np.isnan(made.run_emulated(feeds)["y"][2]).all()


@pytest.mark.parametrize(("keep", "stored"), [((), "mask"), (("^mask$",), "mask.lowered")])
def test_a_mask_in_bf16_or_kept_in_fp32_is_clamped_for_the_profiles_and_restored_exactly(
    keep: tuple[str, ...], stored: str, tmp_path: Path
) -> None:
    made = lower(tmp_path / "m" / "1", graphs.causal(float(_LOWEST)), keep_fp32=keep)
    feeds = {"x": graphs.values(32, 32, seed=5)}
    assert float(made.artifact.tensor(stored).astype(np.float32).min()) == LOWEST
    assert np.isfinite(made.run_emulated(feeds)["y"]).all()
    np.testing.assert_array_equal(made.run_reference(feeds)["y"], made.run_source(feeds)["y"])
    assert_same_tensors(made.artifact, made.checkpoint)


def test_infinities_in_a_mask_matrix_are_not_a_range_error(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", graphs.causal(-np.inf))
    assert np.isneginf(made.artifact.tensor("mask").astype(np.float32)[0, 1:]).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_out_of_range_is_not_taken_as_a_mask(transposed: bool, tmp_path: Path) -> None:
    weight = graphs.values(32, 32)
    weight[0, 0] = _LOWEST
    proto = graphs.mlp((32, 32))
    proto.graph.initializer[0].CopyFrom(graphs.initializer("w0", weight))
    if transposed:
        proto.graph.node[0].input[1] = "turned"
        proto.graph.node.insert(0, helper.make_node("Transpose", ["w0"], ["turned"]))
    with pytest.raises(RangeError, match="'w0': 1 of 1024 values overflow"):
        lower(tmp_path / "m" / "1", proto)


def test_a_constant_of_shape_that_fills_a_mask_is_clamped(tmp_path: Path) -> None:
    proto = graphs.parsed(
        """(float[batch, 16] x) => (float[batch, 16] y) {
            shape = Shape (x) mask = ConstantOfShape <value = float[1] {-3.4028235e38}> (shape)
            scores = MatMul (x, w) masked = Add (scores, mask) y = Softmax <axis = -1> (masked)
        }""",
        w=graphs.values(16, 16),
    )
    made = lower(tmp_path / "m" / "1", proto)
    filled = next(n for n in made.graph("cuda").node if n.op_type == "ConstantOfShape").attribute[0].t
    assert onnx.numpy_helper.to_array(filled)[0] == np.float32(LOWEST)
    assert np.isfinite(made.run_emulated({"x": graphs.values(2, 16)})["y"]).all()
