"""The roofline: FLOPs, bytes and times as computed by hand, and errors that name what is unknown."""

from pathlib import Path

import onnx
import pytest
from onnx import helper

import graphs
from bench.core.workspace import Workspace
from bench.gpu import predicted, roofline
from bench.gpu.costs import Cost, Costs, NotCosted, costs
from bench.gpu.devices import Device
from bench.gpu.sizes import size


def _costs(tmp_path: Path, proto: onnx.ModelProto, **dims: int) -> Costs:
    onnx.save(proto, tmp_path / "graph.onnx")
    return costs(tmp_path / "graph.onnx", dims)


def test_an_mlp_by_hand(tmp_path: Path) -> None:
    found = _costs(tmp_path, graphs.mlp((16, 32, 8)), batch=4)
    by_name = {node.name: (node.flops, node.bytes) for node in found.nodes}
    assert by_name["matmul0"] == (2 * 4 * 16 * 32, 4 * (4 * 16 + 16 * 32 + 4 * 32))
    assert by_name["matmul1"] == (2 * 4 * 32 * 8, 4 * (4 * 32 + 32 * 8 + 4 * 8))
    assert by_name["add0"] == (0, 4 * (4 * 32 + 32 + 4 * 32))
    assert found.least_bytes == 4 * (16 * 32 + 32 + 32 * 8 + 8 + 4 * 16 + 4 * 8)
    assert found.flops("fp32") == 2 * 4 * (16 * 32 + 32 * 8)


def test_products_by_hand(tmp_path: Path) -> None:
    def flops(node: onnx.NodeProto, x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...]) -> int:
        weights = [graphs.initializer("w", graphs.values(*w))]
        proto = graphs.model([node], [graphs.edge("x", x)], [graphs.edge("y", y)], weights)
        (cost,) = _costs(tmp_path, proto).nodes
        return cost.flops

    conv = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1], group=2)
    assert flops(conv, (2, 8, 6, 6), (4, 4, 3, 3), (2, 4, 6, 6)) == 2 * (2 * 4 * 6 * 6) * (4 * 3 * 3)
    gemm = helper.make_node("Gemm", ["x", "w"], ["y"], transA=1)
    assert flops(gemm, (16, 4), (16, 8), (4, 8)) == 2 * 4 * 8 * 16
    stacked = helper.make_node("MatMul", ["x", "w"], ["y"])
    assert flops(stacked, (3, 5, 16), (16, 8), (3, 5, 8)) == 2 * (3 * 5 * 8) * 16


def test_bf16_has_two_bytes_and_its_products_are_counted_separately(tmp_path: Path) -> None:
    edges = "(float[8, 8] x, bfloat16[8, 8] a, bfloat16[8, 8] b) => (float[8, 8] y, bfloat16[8, 8] c)"
    found = _costs(tmp_path, graphs.parsed(f"{edges} {{ [narrow] c = MatMul (a, b) y = MatMul (x, x) }}"))
    assert [(node.precision, node.bytes) for node in found.nodes] == [("bf16", 2 * 3 * 64), ("fp32", 4 * 3 * 64)]
    assert found.flops("bf16") == found.flops("fp32") == 2 * 8 * 8 * 8


def test_views_and_constants_move_nothing_and_lookups_move_only_their_rows(tmp_path: Path) -> None:
    proto = graphs.parsed(
        """(int64[5] ids) => (float[5, 16] y) { [constant] turned = Transpose (table)
            [rows] rows = Gather (turned, ids) [view] same = Identity (rows) [relu] y = Relu (same)
        }""",
        table=graphs.values(16, 1000),
    )
    found = {node.name: node.bytes for node in _costs(tmp_path, proto).nodes}
    assert found == {"rows": 2 * 4 * 5 * 16 + 8 * 5, "view": 0, "relu": 2 * 4 * 5 * 16}


def test_a_dimension_may_be_an_expression() -> None:
    dims = {"seq": 128, "batch": 4, "a.b": 3}
    told = {"seq": 128, "Min(512, seq)": 128, "2*seq + 1": 257, "Max(1, seq//100)": 1, "a.b": 3, "batch - 1": 3}
    assert {expression: size(expression, dims) for expression in told} == told
    strange = ("other", "seq ** 9", "__import__('os')", "seq/2", "", "Min(512", "seq // 0", "Min(a=1)", "seq.real")
    assert [expression for expression in strange if size(expression, dims) is not None] == []


def test_an_unknown_dimension_or_operator_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(NotCosted, match="input 'x': dimension batch has no size; give it: --dim batch=SIZE"):
        _costs(tmp_path, graphs.mlp())
    with pytest.raises(NotCosted, match="nobody has said what Loop computes"):
        _costs(tmp_path, graphs.loop(), batch=2)


def test_times_by_hand() -> None:
    device = Device("D", {"bf16": 100.0, "tf32": 50.0, "fp32": 10.0}, 1000.0, "")
    product, moved = Cost("p", "MatMul", 400, 1000, "bf16"), Cost("m", "Add", 0, 3000, "bf16")
    wide, view = Cost("w", "MatMul", 100, 100, "fp32"), Cost("v", "Reshape", 0, 0, "fp32")
    of = Costs((product, moved, wide, view), least_bytes=500)
    found = roofline.predict(of, device)
    assert found == roofline.Prediction(least=4 + 10, by_node=4 + 3 + 10, bound=14 / 17, launches=3)
    assert roofline.predict(of, device, "tf32").by_node == 4 + 3 + 2
    assert roofline.predict(Costs((moved,), 9000), device).least == 9  # one pass through memory takes longer


@pytest.mark.models  # converts MiniLM
def test_the_page_equals_the_predictions_for_the_graphs(tmp_path: Path) -> None:
    assert predicted.shown() == predicted.tables(Workspace(tmp_path)), "run python -m bench.gpu.predicted"
