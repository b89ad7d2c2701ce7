"""Tensors of a checkpoint are matched with initializers, and a BatchNorm is folded into them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from lowered import assert_same_tensors, lower, relative_l2
from numpy.typing import NDArray
from onnx import ModelProto
from peaks import measured_alone

import graphs
from bf16kit.converter.rewrite import prepare
from bf16kit.converter.rewrite.batchnorm import SMALLEST_SCALE
from bf16kit.converter.rewrite.matching import Match, match


def _graph() -> ir.Graph:
    return ir.from_proto(graphs.mlp((16, 32))).graph


def test_initializers_get_the_checkpoint_s_names_whatever_the_exporter_named_them() -> None:
    graph = _graph()
    checkpoint: dict[str, NDArray[Any]] = {
        "fc.weight": np.ascontiguousarray(graphs.values(16, 32).T),
        "fc.bias": graph.initializers["b0"].const_value.numpy(),  # type: ignore[union-attr]
    }
    assert match(graph, checkpoint) == {"fc.weight": Match("fc.weight", (1, 0)), "fc.bias": Match("fc.bias")}
    assert sorted(graph.initializers) == ["fc.bias", "fc.weight"]


def test_tied_tensors_match_one_initializer_and_other_tensors_none() -> None:
    graph, weight = _graph(), graphs.values(16, 32)
    found = match(graph, {"a": weight, "b": weight.T, "c": weight + 1})
    assert found == {"a": Match("a"), "b": Match("a", (1, 0))}


def test_an_initializer_does_not_take_the_name_of_an_activation() -> None:
    graph = _graph()
    found = match(graph, {"y": graphs.values(16, 32)})
    assert found == {"y": Match("y_1")}


PREPARE = """
import graphs
import numpy as np
import onnx_ir as ir
from bf16kit.converter.graph.initializers import ComputedTensor, rows_of
from bf16kit.converter.rewrite import prepare
from bf16kit.converter.process.memory import map_large_blocks
from peaks import anonymous, peak_anonymous
map_large_blocks()
def prepared(width):
    model, checkpoint = ir.from_proto(graphs.mlp((width,) * 13)), {}
    for name, value in model.graph.initializers.items():
        half = checkpoint[name] = value.const_value.numpy().astype(np.float16)
        read = lambda rows, half=half: rows_of(half, rows).astype(np.float32)
        value.const_value = ComputedTensor(read, value.const_value)
    before = anonymous()
    with peak_anonymous() as peak:
        found = prepare(model, checkpoint)
    assert len(found.matches) == 24
    return peak.bytes - before
prepared(64)  # its libraries are in memory from here on
print(prepared(1024), 12 * 4 * 1024 * 1024)
"""


@pytest.mark.long
def test_widened_weights_are_matched_one_at_a_time() -> None:
    """The fp16 checkpoint has 50 MB in fp32, 4 MB per weight."""
    peak, size = map(int, measured_alone(PREPARE).split())
    assert peak / size < 0.5, f"{peak / size:.2f} times the weights"


@pytest.mark.parametrize(
    ("shape", "order"),
    [((5, 3, 2, 4), (2, 3, 1, 0)), ((6, 1, 2, 3), (2, 3, 0, 1)), ((5, 4, 2, 3, 6), (2, 3, 4, 1, 0))],
    ids=["convolution", "depthwise", "volumes"],
)
def test_convolution_weights_of_tensorflow_match_with_their_axes_permuted(
    shape: tuple[int, ...], order: tuple[int, ...]
) -> None:
    """The permutation turns the initializer into the checkpoint's tensor, not the other way round."""
    kernel = graphs.values(*shape)
    graph = ir.Graph([], [], nodes=[], initializers=[ir.Value(name="k", const_value=ir.tensor(kernel, name="k"))])
    found = match(graph, {"w": np.ascontiguousarray(kernel.transpose(order))})
    assert found == {"w": Match("w", order)}


_X = np.random.default_rng(7).standard_normal((4, 16, 6, 6)).astype(np.float32)
_ROWS = np.random.default_rng(8).standard_normal((4, 16)).astype(np.float32)


def _model(nodes: str, **weights: NDArray[np.float32]) -> ModelProto:
    """Return ``nodes``, which compute ``c`` of 32 channels from ``x`` of 16 → BatchNormalization → y."""
    pixels = "" if "Gemm" in nodes else ", 6, 6"
    return graphs.parsed(
        f"""(float[batch, 16{pixels}] x) => (float[batch, 32{pixels and ", h, w"}] y) {{
            {nodes} [norm] y = BatchNormalization (c, gamma, beta, mean, variance)
        }}""",
        **weights,
        gamma=graphs.values(32, seed=10) + 1,
        beta=graphs.values(32, seed=11),
        mean=graphs.values(32, seed=12),
        variance=np.abs(graphs.values(32, seed=13)) + np.float32(0.5),
    )


def _conv() -> ModelProto:
    return _model("c = Conv (x, w, b)", w=graphs.values(32, 16, 3, 3), b=graphs.values(32, seed=1))


def _conv_transpose(groups: int = 1) -> ModelProto:
    return _model(f"c = ConvTranspose <group = {groups}> (x, w)", w=graphs.values(16, 32 // groups, 3, 3))


def _gemm(transposed: int) -> ModelProto:
    weight = graphs.values(*((32, 16) if transposed else (16, 32)))
    node = f"c = Gemm <transB = {transposed}, alpha = 0.5, beta = 2.0> (x, w, b)"
    return _model(node, w=weight, b=graphs.values(32, seed=1))


def _replaced(proto: ModelProto, name: str, array: NDArray[np.float32]) -> ModelProto:
    found = next(tensor for tensor in proto.graph.initializer if tensor.name == name)
    found.CopyFrom(graphs.initializer(name, array))
    return proto


_FOLDABLE = {
    "conv": (_conv(), _X),
    "conv_transpose": (_conv_transpose(), _X),
    "gemm": (_gemm(0), _ROWS),
    "gemm_transposed": (_gemm(1), _ROWS),
}


@pytest.mark.parametrize("case", _FOLDABLE)
def test_batchnorm_is_folded_into_the_weights_before_they_are_rounded(case: str, tmp_path: Path) -> None:
    proto, x = _FOLDABLE[case]
    made = lower(tmp_path / "m" / "1", proto)
    assert "BatchNormalization" not in made.ops("cpu")
    assert "BatchNormalization" in made.ops("reference")
    source = made.run_source({"x": x})["y"]
    np.testing.assert_array_equal(made.run_reference({"x": x})["y"], source)
    assert relative_l2(source, made.run_cpu({"x": x})["y"]) < 4e-3
    assert_same_tensors(made.artifact, made.checkpoint)


def test_the_folded_weight_is_rounded_once_from_float64(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", _conv())
    c = {name: array.astype(np.float64) for name, array in made.checkpoint.items()}
    scale = c["gamma"] / np.sqrt(c["variance"] + np.float64(np.float32(1e-5)))
    expected = (c["w"] * scale[:, None, None, None]).astype(np.float32).astype(made.artifact.tensor("w").dtype)
    np.testing.assert_array_equal(made.artifact.tensor("w"), expected)


def test_a_channel_scaled_by_zero_is_folded_and_still_restored(tmp_path: Path) -> None:
    """Pruned channels are common. Without a smallest scale, each of their weights would take 12 bytes."""
    gamma = graphs.values(32, seed=3) + 1
    gamma[::2] = 0
    made = lower(tmp_path / "m" / "1", _replaced(_conv(), "gamma", gamma))
    fold = made.prepared.folds["w"]
    assert float(np.abs(fold.values).min()) == SMALLEST_SCALE
    source, cpu = made.run_source({"x": _X})["y"], made.run_cpu({"x": _X})["y"]
    np.testing.assert_array_equal(source[:, ::2], cpu[:, ::2])
    assert relative_l2(source, cpu) < 4e-3
    assert_same_tensors(made.artifact, made.checkpoint)
    assert made.size("residual.bin", "weights.bf16") < 1.03 * made.checkpoint["w"].nbytes


_KEPT = {
    "shared weight": _model("c = Conv (x, w) d = Conv (x, w) unused = ReduceSum (d)", w=graphs.values(32, 16, 3, 3)),
    "not finite": _replaced(_conv(), "variance", np.full(32, -1, np.float32)),
    "the product overflows": _replaced(
        _replaced(_conv(), "w", graphs.values(32, 16, 3, 3) * np.float32(1e37)), "gamma", np.full(32, 1e4, np.float32)
    ),
    "groups": _conv_transpose(groups=2),
}


@pytest.mark.parametrize("case", _KEPT)
def test_a_batchnorm_that_cannot_be_folded_is_kept(case: str, tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", _KEPT[case])
    assert made.prepared.folds == {}
    assert "BatchNormalization" in made.ops("cpu")
    assert made.precision()["norm"] == "fp32"
    assert_same_tensors(made.artifact, made.checkpoint)


@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", True), ("float16", True), ("float64", False)])
@pytest.mark.parametrize("case", _FOLDABLE)
def test_a_batchnorm_after_a_weight_that_was_bf16_or_fp16_is_kept(case: str, dtype: str, kept: bool) -> None:
    """A weight that was fp64 is rounded in any case, and restored as fp32, so its BatchNorm is folded."""
    model = ir.from_proto(_FOLDABLE[case][0])
    source = model.graph.initializers["w"]
    assert source.const_value is not None
    stored = source.const_value.numpy().astype(dtype)
    source.const_value = ir.tensor(stored.astype(np.float32), name="w")
    prepared = prepare(model, {"stored": stored})
    assert prepared.matches["stored"].initializer == "stored"
    assert ("stored" not in prepared.folds) == kept
    assert ("BatchNormalization" in [node.op_type for node in prepared.base.graph]) == kept
