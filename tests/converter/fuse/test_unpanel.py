"""Graphs turn weights stored in panels back into matrices, and ONNX Runtime does so once, at load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from lowered import lower, relative_l2
from onnx import ModelProto

import graphs
from bf16kit.numerics.rounding import to_bf16, to_fp32
from bf16kit.runtime.ort.session import ort
from converter.fuse.fuse import PUT_TOGETHER
from converter.verify.running import emulation

# K and N with no whole panel, one, several, and a narrower last one
SHAPES = [(40, 7), (7, 96), (40, 96), (16, 33), (9, 100)]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_matrix_is_read_bit_for_bit(shape: tuple[int, int], axis: int, tmp_path: Path) -> None:
    """The product with the unit matrix shows each of its values."""
    rows, columns = shape
    matrix = graphs.values(rows, columns)
    proto = graphs.parsed(
        f"(float[{rows}, {rows}] x) => (float[{rows}, {columns}] y) {{ y = Gemm <transB = {1 - axis}> (x, w) }}",
        w=matrix if axis else np.ascontiguousarray(matrix.T),
    )
    made = lower(tmp_path / "m" / "1", proto, profiles=["cuda"], panels={"w": axis})
    onnx.checker.check_model(str(made.artifact.file("cuda.onnx")), full_check=True)
    found = made.run_emulated({"x": np.eye(rows, dtype=np.float32)})["y"]
    assert found.tobytes() == to_fp32(to_bf16(matrix)).tobytes()


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
    assert set(made.ops("cuda")) >= PUT_TOGETHER
    path = made.artifact.file("cuda.onnx")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    ort.InferenceSession(emulation(path), options)
    optimised = onnx.load(tmp_path / "optimised.onnx").graph
    assert not {node.op_type for node in optimised.node} & PUT_TOGETHER
