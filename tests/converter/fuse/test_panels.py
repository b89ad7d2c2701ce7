"""Weights in panels: the kernel looks their rows up, and other graphs turn them back into matrices."""

from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from layers import answers, ours
from lowered import Array, Lowered, lower, relative_l2
from onnx import ModelProto, TensorProto

import graphs
from bf16kit.converter.fuse.fuse import PUT_TOGETHER
from bf16kit.converter.verify.running import emulation
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.rounding import to_bf16, to_fp32
from bf16kit.runtime.ort.kernel import VARIABLE
from bf16kit.runtime.ort.session import ort

_WIDTH = 40
_OPERATORS = {96: "Gather_panels", 50: "Gather_panels_tail", 20: "Gather_panels_narrow"}


def _tied(rows: int, indices: Sequence[str] = ("batch", "seq"), dtype: str = "int64", more: str = "") -> ModelProto:
    """Return a graph: ``found`` are the rows ``ids`` of ``table`` [rows, 40]; y is x [count, 40] times tableᵀ."""
    ids, found = f"[{', '.join(indices)}]" if indices else "", ", ".join([*indices, str(_WIDTH)])
    outputs = "" if not more else ", float[batch, 16] where, float[batch, 96] scores"
    return graphs.parsed(
        f"""({dtype}{ids} ids, float[count, {_WIDTH}] x)
        => (float[{found}] found, float[count, {rows}] y{outputs}) {{
            [lookup] found = Gather (table, ids) [product] y = Gemm <transB = 1> (x, table) {more}
        }}""",
        table=graphs.values(rows, _WIDTH),
        **({"positions": graphs.values(64, 16)} if more else {}),
    )


def _feeds(ids: Array) -> dict[str, Array]:
    return {"ids": ids, "x": graphs.values(3, _WIDTH, seed=5)}


def _table(made: Lowered) -> Array:
    """Return the table of the artifact, widened."""
    table = made.artifact.tensor("table")
    assert table.dtype == ml_dtypes.bfloat16
    return table.astype(np.float32)


@pytest.mark.parametrize(
    ("rows", "shape"), [(96, ()), (96, (1,)), (96, (0,)), (50, (7,)), (50, (0,)), (50, (2, 3)), (20, (7,)), (20, ())]
)
def test_lookups_in_panels_give_the_table_s_rows_with_and_without_the_kernel(
    rows: int, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lower(tmp_path / "m" / "1", _tied(rows, [f"d{i}" for i in range(len(shape))]))
    assert ours(made)[0].op_type == _OPERATORS[rows]
    assert made.artifact.manifest.tensors[0].panels == 0
    ids = np.random.default_rng(rows).integers(-rows, rows, shape)
    for answer in answers(made, _feeds(ids), monkeypatch):
        np.testing.assert_array_equal(answer["found"], _table(made)[ids])
        np.testing.assert_allclose(answer["y"], _feeds(ids)["x"] @ _table(made).T, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("wrong", [50, -51, 2**40])
def test_an_index_out_of_range_is_an_error(wrong: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = lower(tmp_path / "m" / "1", _tied(50, ["batch"]))
    feeds = _feeds(np.array([3, wrong]))
    with pytest.raises(RuntimeFailure, match=f"index {wrong}, number . of them, is outside of a table of 50 rows"):
        made.run_kernel(feeds)
    monkeypatch.setenv(VARIABLE, "off")
    with pytest.raises(RuntimeFailure, match=f"indices element out of data bounds, idx={wrong}"):
        made.run_cpu(feeds)


def test_a_table_of_several_lookups_and_products_is_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder and an encoder may share embeddings like this. Positions have a separate table."""
    more = """where = Gather (positions, ids) again = Gather <axis = -2> (table, ids)
        turned = Transpose (table) scores = MatMul (again, turned)"""
    made, feeds = lower(tmp_path / "m" / "1", _tied(96, ["batch"], more=more)), _feeds(np.array([1, 0, 63]))
    kinds = ["Gather_panels", "MatMul_panels", "Gather_panels", "MatMul_panels"]
    assert [node.op_type for node in ours(made)] == kinds
    assert [function.name for function in onnx.load(made.artifact.file("cpu.onnx")).functions] == kinds[:2]
    assert made.ops("cpu").count("Gather") == 1
    assert made.size("weights.bf16") == 2 * (96 * _WIDTH + 64 * 16)
    source = made.run_source(feeds)
    for answer in [*answers(made, feeds, monkeypatch), made.run_emulated(feeds)]:
        assert all(relative_l2(source[name], answer[name]) < 8e-3 for name in source)


def test_without_the_kernel_the_looked_up_table_stays_bf16(tmp_path: Path) -> None:
    """At load there is one bf16 table for the look-up and one fp32 table for the product, no more."""
    made = lower(tmp_path / "m" / "1", _tied(96))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    path = str(made.artifact.file("cpu.onnx"))
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    optimised = onnx.load(tmp_path / "optimised.onnx").graph
    assert sorted(node.op_type for node in optimised.node) == ["Cast", "Gather", "MatMul"]
    types = {(tensor.data_type, *tensor.dims) for tensor in optimised.initializer}
    assert types == {(TensorProto.BFLOAT16, 96, _WIDTH), (TensorProto.FLOAT, _WIDTH, 96)}


@pytest.mark.parametrize("opset", [13, 17, 21, 24])
def test_the_graph_is_plain_onnx_that_checks_and_runs_without_bf16kit(
    opset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indices of 32 bits are widened."""
    if opset == 24 and tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 24):
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} does not know opset 24")  # kernels/tests/versions.sh
    proto, feeds = _tied(50, dtype="int32"), _feeds(np.array([[1, 2], [3, -4]], np.int32))
    proto.opset_import[0].version = opset
    made = lower(tmp_path / "m" / "1", proto)
    assert made.ops("cpu") == ["Cast", "Gather_panels_tail", "MatMul_panels_tail"]
    onnx.checker.check_model(str(made.artifact.file("cpu.onnx")), full_check=True)
    for answer in answers(made, feeds, monkeypatch):
        np.testing.assert_array_equal(answer["found"], _table(made)[feeds["ids"]])


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
