from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from lowered import Lowered, lower
from numpy.typing import NDArray

import graphs
from converter.fuse.unpanel import PUT_TOGETHER
from converter.verify.emulate import emulation

Array = NDArray[np.float32]


def _round(x: NDArray[np.generic]) -> Array:
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def _sums_exactly(rows: int, columns: int, seed: int) -> Array:
    """Return multiples of 1/64 below 1, exact in bf16; their products add up in fp32 without rounding in any order."""
    return np.random.default_rng(seed).integers(-63, 64, (rows, columns)).astype(np.float32) / np.float32(64)


def _mlp(tmp_path: Path) -> Lowered:
    proto = graphs.mlp((32, 32, 32))
    for layer in (0, 1):
        proto.graph.initializer[2 * layer].CopyFrom(graphs.initializer(f"w{layer}", _sums_exactly(32, 32, layer)))
    return lower(tmp_path / "m" / "1", proto)


def test_the_first_layer_alone_agrees_with_numpy_in_every_bit(tmp_path: Path) -> None:
    proto = graphs.mlp((32, 32))
    proto.graph.initializer[0].CopyFrom(graphs.initializer("w0", _sums_exactly(32, 32, 1)))
    made, x = lower(tmp_path / "m" / "1", proto), _sums_exactly(8, 32, 5)
    expected = _round(_round(x @ made.checkpoint["w0"]) + _round(made.checkpoint["b0"]))
    unrounded = x @ made.checkpoint["w0"] + _round(made.checkpoint["b0"])
    assert np.mean(expected != unrounded) > 0.5, "the example must need its rounding"
    np.testing.assert_array_equal(made.run_emulated({"x": x})["y"], expected)


def test_the_emulation_computes_nothing_in_bf16(tmp_path: Path) -> None:
    made = _mlp(tmp_path)
    graph = onnx.load_from_string(emulation(made.artifact.file("cuda.onnx"))).graph
    computing = [node for node in graph.node if node.op_type not in PUT_TOGETHER]
    assert {node.op_type for node in computing} == {"Cast", "MatMul", "Add", "Relu"}
    bf16 = {v.name for v in graph.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16}
    bf16 |= {t.name for t in graph.initializer if t.data_type == onnx.TensorProto.BFLOAT16}
    for node in computing:
        if node.op_type != "Cast":
            assert not bf16 & {*node.input, *node.output}
