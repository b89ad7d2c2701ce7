"""Graphs turn weights stored in panels back into matrices, and ONNX Runtime does so once, at load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from lowered import lower, relative_l2
from onnx import ModelProto

import graphs
from bf16kit.artifact.manifest import TensorEntry
from bf16kit.numerics.panels import pack
from bf16kit.numerics.rounding import to_bf16
from bf16kit.runtime.ort.session import ort
from converter.fuse.fuse import PUT_TOGETHER, Unpanel
from converter.graph.types import run
from converter.verify.running import emulation
from converter.write.graphs import serialize

# K and N with no whole panel, one, several, and a narrower last one
SHAPES = [(40, 7), (7, 32), (40, 96), (16, 33), (9, 100)]
FILE = "weights.bf16"


def stored(shape: tuple[int, int], axis: int) -> TensorEntry:
    size = shape[0] * shape[1]
    return TensorEntry(name="w", dtype="bfloat16", shape=list(shape), file=FILE, offset=64, bytes=2 * size, panels=axis)


def reader(shape: tuple[int, ...]) -> ir.Model:
    """Return a model that widens the initializer ``w`` to the output ``y``."""
    data = ir.tensor(to_bf16(graphs.values(*shape)), name="w")
    value = ir.Value(name="w", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.BFLOAT16), const_value=data)
    node = ir.node("Cast", [value], attributes={"to": 1}, name="widen")
    output = node.outputs[0]
    output.name, output.type, output.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    graph = ir.Graph([], node.outputs, nodes=[node], initializers=[value], name="g", opset_imports={"": 22})
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_matrix_is_read_bit_for_bit(shape: tuple[int, int], axis: int, tmp_path: Path) -> None:
    shape = shape if axis == 1 else shape[::-1]
    matrix = to_bf16(graphs.values(*shape))
    (tmp_path / FILE).write_bytes(bytes(64) + pack(matrix, axis).tobytes())
    step = Unpanel({"w": stored(shape, axis)})
    model = run([step], reader(shape))
    assert step.declared.keys() >= {"w"}
    assert sum(tensor.nbytes for tensor in step.declared.values()) == matrix.nbytes
    assert {tensor.offset % 64 for tensor in step.declared.values() if tensor.offset is not None} == {0}
    (tmp_path / "m.onnx").write_bytes(serialize(model))
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
    answer = ort.InferenceSession(str(tmp_path / "m.onnx")).run(None, {})[0]
    assert answer.tobytes() == matrix.astype(np.float32).tobytes()


def products() -> ModelProto:
    """Return a graph that reads [N, K] in a Gemm, in a MatMul after Transpose, and in an If, each with a tail."""
    return graphs.parsed(
        """(float[batch, 48] x, bool flag) => (float[batch, 40] y) {
            g = Gemm <transB = 1> (x, a) bt = Transpose <perm = [1, 0]> (b) h = MatMul (g, bt)
            y = If (flag) <
                then_branch = then_graph () => (float[batch, 40] t) { t = MatMul (h, c) },
                else_branch = other_graph () => (float[batch, 40] o) { o = Identity (h) }
            >
        }""",
        a=graphs.values(48, 70, seed=1).T.copy(),
        b=graphs.values(70, 40, seed=2).T.copy(),
        c=graphs.values(40, 40, seed=3),
    )


def test_onnx_runtime_puts_panels_together_when_it_loads(tmp_path: Path) -> None:
    """All weights are in panels, also the one in the body, which the kernel would not read from panels."""
    made = lower(tmp_path / "m" / "1", products(), profiles=["cuda"], panels={"a": 0, "b": 0, "c": 1})
    for flag in (True, False):
        feeds = {"x": graphs.values(3, 48, seed=4), "flag": np.array(flag)}
        assert relative_l2(made.run_source(feeds)["y"], made.run_emulated(feeds)["y"]) < 1e-2
    path = made.artifact.file("cuda.onnx")
    assert {node.op_type for node in onnx.load(path, load_external_data=False).graph.node} >= PUT_TOGETHER
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    ort.InferenceSession(emulation(path), options)
    optimised = onnx.load(tmp_path / "optimised.onnx").graph
    assert not {node.op_type for node in optimised.node} & PUT_TOGETHER
