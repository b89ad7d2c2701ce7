"""Comparing the inner values of two graphs by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from peaks import measured_alone

import graphs
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.ort.onnx import OnnxRuntime
from converter.source import Feeds
from converter.verify import probing
from converter.verify.probing import Graph, Power, compare


def graph(model: ModelProto, tmp_path: Path) -> Graph:
    from onnx import shape_inference

    return Graph(ir.serde.deserialize_model(shape_inference.infer_shapes(model)), tmp_path, {})


def scaled(model: ModelProto, weight: str, factor: float) -> ModelProto:
    copy = ModelProto.FromString(model.SerializeToString())
    tensor = next(t for t in copy.graph.initializer if t.name == weight)
    array = np.frombuffer(tensor.raw_data, np.float32) * np.float32(factor)
    tensor.raw_data = array.tobytes()
    return copy


def test_each_inner_value_is_compared_by_name(tmp_path: Path) -> None:
    """With the first weight 1% too large, its product is 1% off: a power ratio of 1e-4. The output is off as well."""
    model = graphs.mlp()
    feeds = [{"x": graphs.values(4, 16, seed=seed)} for seed in (0, 1)]
    powers = compare(graph(model, tmp_path), graph(scaled(model, "w0", 1.01), tmp_path), feeds)
    assert list(powers) == ["m0", "a0", "h0", "m1", "y"]
    assert powers["m0"].ratio == pytest.approx(1e-4, rel=1e-2)
    assert powers["m0"].count == 2 * 4 * 32
    assert 1e-6 < powers["y"].ratio < 1e-3


def test_sequences_are_not_compared(tmp_path: Path) -> None:
    """They have the dtype of their tensors, and are none."""
    nodes = [
        helper.make_node("SplitToSequence", ["x"], ["parts"], axis=1),
        helper.make_node("SequenceAt", ["parts", "first"], ["part"]),
        helper.make_node("Add", ["part", "part"], ["y"]),
    ]
    first = helper.make_tensor("first", TensorProto.INT64, [], [0])
    model = graphs.model(nodes, [graphs.edge("x", ["n", 2])], [graphs.edge("y", ["n", 1])], [first])
    sides = graph(model, tmp_path), graph(model, tmp_path)
    assert compare(*sides, [{"x": graphs.values(3, 2)}]).keys() == {"part", "y"}


def test_a_graph_that_reads_strings_is_compared_too(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Equal", ["words", "known"], ["same"]),
        helper.make_node("Cast", ["same"], ["hot"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["hot", "x"], ["y"]),
    ]
    words = helper.make_tensor_value_info("words", TensorProto.STRING, ["n", 2])
    known = numpy_helper.from_array(np.array(["a", "b"], object), "known")
    model = graphs.model(nodes, [words, graphs.edge("x", ["n", 2])], [graphs.edge("y", ["n", 2])], [known])
    feeds = [{"words": np.array([[b"a", b"c"]], object), "x": graphs.values(1, 2)}]
    powers = compare(graph(model, tmp_path), graph(model, tmp_path), feeds)
    assert {name: power.ratio for name, power in powers.items()} == {"hot": 0.0, "y": 0.0}


def test_a_graph_equals_itself(tmp_path: Path) -> None:
    model = graph(graphs.mlp(), tmp_path)
    assert {power.ratio for power in compare(model, model, [{"x": graphs.values(4, 16)}]).values()} == {0.0}


def test_chunks_change_only_how_many_values_are_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = graphs.mlp((16, 16, 16, 16, 16, 16, 16))
    sides = graph(model, tmp_path), graph(scaled(model, "w0", 1.01), tmp_path)
    feeds = [{"x": graphs.values(4, 16)}]
    whole = compare(*sides, feeds)
    held: list[int] = []
    opened = probing._open

    def counting(side: Graph, names: Sequence[str]) -> OnnxRuntime:
        held.append(len(names))
        return opened(side, names)

    monkeypatch.setattr(probing, "_open", counting)
    assert compare(*sides, feeds, chunk=3 * 4 * 16 * 4) == whole
    assert held == [8, 8, 3, 3, 3, 3, 3, 3], "8 values to learn how large they are, then 3 of 256 bytes at a time"


def test_figures_equal_those_of_one_run_that_returns_every_value(tmp_path: Path) -> None:
    """Every node that a value needs runs, and leaving out other nodes does not change the value."""
    model = graphs.mlp((16, 32, 32, 8))
    other, feed = scaled(model, "w1", 1.01), {"x": graphs.values(4, 16)}
    expected, found = (everything(each, feed) for each in (model, other))
    powers = compare(graph(model, tmp_path), graph(other, tmp_path), [feed], chunk=1)
    assert powers.keys() == expected.keys()
    for name, power in powers.items():
        r, c = expected[name].astype(np.float64), found[name].astype(np.float64)
        assert power.ratio == pytest.approx(np.sum((c - r) ** 2) / np.sum(r**2), rel=1e-12)


def everything(model: ModelProto, feed: Feeds) -> Feeds:
    """Return the outputs of all nodes of ``model``, from one session."""
    names = [name for node in model.graph.node for name in node.output]
    whole = ModelProto.FromString(model.SerializeToString())
    del whole.graph.output[:]
    whole.graph.output.extend(graphs.edge(name) for name in names)
    outputs = [TensorSpec(name, "float32", ()) for name in names]
    inputs = [TensorSpec("x", "float32", ("batch", 16))]
    return OnnxRuntime(whole.SerializeToString(), inputs, outputs, precision="fp32").run(feed)


def test_values_that_only_the_body_of_a_node_reads_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``y`` needs ``h`` only through the branches of an If."""
    branches = [
        helper.make_graph([helper.make_node(op, ["h"], [op])], op, [], [graphs.edge(op, ["n", 4])])
        for op in ("Neg", "Abs")
    ]
    nodes = [
        helper.make_node("Relu", ["x"], ["h"]),
        helper.make_node("Exp", ["x"], ["unneeded"]),
        helper.make_node("If", ["yes"], ["y"], then_branch=branches[0], else_branch=branches[1]),
    ]
    edges = [graphs.edge("x", ["n", 4]), graphs.edge("yes", [], TensorProto.BOOL)]
    side = graph(graphs.model(nodes, edges, [graphs.edge("y", ["n", 4])]), tmp_path)
    feeds = [{"x": graphs.values(2, 4), "yes": np.array(value)} for value in (True, False)]
    monkeypatch.setattr(probing, "_FIRST", 1)  # each value in a session of its own
    assert compare(side, side, feeds, chunk=1).keys() == {"h", "unneeded", "y"}


def test_values_of_different_shapes_are_not_compared(tmp_path: Path) -> None:
    def transposed(perm: list[int]) -> ModelProto:
        nodes = [
            helper.make_node("Transpose", ["x"], ["t"], perm=perm),
            helper.make_node("ReduceSum", ["t"], ["y"], keepdims=0),
        ]
        return graphs.model(nodes, [graphs.edge("x", [2, 3])], [graphs.edge("y", [])])

    powers = compare(
        graph(transposed([0, 1]), tmp_path), graph(transposed([1, 0]), tmp_path), [{"x": graphs.values(2, 3)}]
    )
    assert list(powers) == ["y"]


def test_integers_are_not_compared(tmp_path: Path) -> None:
    nodes = [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Relu", ["x"], ["y"])]
    model = graphs.model(nodes, [graphs.edge("x", ["n", 4])], [graphs.edge("y", ["n", 4])])
    model.graph.output.append(graphs.edge("s", [2], TensorProto.INT64))
    side = graph(model, tmp_path)
    assert list(compare(side, side, [{"x": graphs.values(2, 4)}])) == ["y"]


def test_a_mask_beyond_bf16_is_left_out_and_an_overflow_is_not() -> None:
    power = Power()
    lowest = np.finfo(np.float32).min
    power.add(np.array([1.0, lowest], np.float32), np.array([1.5, -3.3895313892515355e38], np.float32))
    assert (power.count, power.ratio) == (1, 0.25)
    power.add(np.array([3e38], np.float32), np.array([math.inf], np.float32))
    assert power.ratio == math.inf


def test_noise_where_the_reference_is_zero_is_infinite() -> None:
    power = Power()
    power.add(np.zeros(2, np.float32), np.ones(2, np.float32))
    assert power.ratio == math.inf


PROBE = """
import sys
from pathlib import Path
import graphs
import numpy as np
import onnx_ir as ir
from converter.process.memory import map_large_blocks
from converter.verify.probing import Graph, compare
from onnx import TensorProto
from onnx.shape_inference import infer_shapes
from peaks import anonymous, peak_anonymous
map_large_blocks()
def side(name, width):
    model = infer_shapes(graphs.mlp((width,) * 4))
    path = graphs.save_external(model, Path(sys.argv[1]) / name / "model.onnx", {TensorProto.FLOAT: "weights"})
    return Graph(ir.load(path), path.parent, {})
feeds = lambda width: [{"x": graphs.values(1, width)}]
compare(side("small", 64), side("small", 64), feeds(64))  # its libraries are in memory from here on
large = side("large", 2048)
before = anonymous()
with peak_anonymous() as peak:
    assert len(compare(large, large, feeds(2048))) == 8
print(peak.bytes - before, 3 * 4 * 2048 * 2048)
"""


def test_weights_of_products_are_not_copied(tmp_path: Path) -> None:
    """Two graphs of 50 MB are open at once; weights packed for speed would be in memory a second time."""
    (tmp_path / "small").mkdir()
    (tmp_path / "large").mkdir()
    peak, size = map(int, measured_alone(PROBE, str(tmp_path)).split())
    assert peak / size < 0.5, f"{peak / size:.2f} times the weights"
