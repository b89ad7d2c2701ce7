"""LSTM and GRU become nodes of the kernel, which read their weights in bf16 as they are stored; other forms stay."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import ours
from lowered import lower
from onnx import ModelProto, helper

import graphs
from bf16kit.converter.plan.decisions import Islands
from bf16kit.converter.report.oncpu import on_cpu
from bf16kit.runtime.loading import load
from bf16kit.runtime.ort.kernel import VARIABLE

STEPS, INPUTS, HIDDEN = 5, 20, 260
GATES = {"LSTM": 4, "GRU": 3}
PARTS = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}  # where PyTorch has ONNX's gates


def layer(op: str, direction: str = "forward", *, apart: bool = False, states: bool = True, **given: Any) -> ModelProto:
    """Return the model x [STEPS, batch, INPUTS], h, c → y, and the last h and c with ``states``.

    With ``apart``, each direction has its own weights with the gates in PyTorch's order, and nodes put them together.
    """
    count, directions = GATES[op], 2 if direction == "bidirectional" else 1
    weights: dict[str, Any] = {"b": graphs.values(directions, 2 * count * HIDDEN, seed=9)}
    nodes = []
    for name, width in (("w", INPUTS), ("r", HIDDEN)):
        stacked = graphs.values(directions, count * HIDDEN, width, seed=width) / np.float32(width**0.5)
        if not apart:
            weights[name] = stacked
            continue
        for d, one in enumerate(stacked):
            blocks = one.reshape(count, HIDDEN, width)
            weights[f"{name}{d}"] = np.concatenate([blocks[PARTS[op].index(place)] for place in range(count)])
            for gate, place in enumerate(PARTS[op]):
                ends = [f"end{place}", f"end{place + 1}", "end0"]
                nodes.append(helper.make_node("Slice", [f"{name}{d}", *ends], [f"{name}{d}{gate}"]))
            parts = [f"{name}{d}{gate}" for gate in range(count)]
            nodes.append(helper.make_node("Concat", parts, [f"{name}{d}all"], axis=0))
            nodes.append(helper.make_node("Unsqueeze", [f"{name}{d}all", "axis"], [f"{name}{d}row"]))
        rows = [f"{name}{d}row" for d in range(directions)]
        nodes.append(helper.make_node("Concat", rows, [name], axis=0))
    if apart:
        weights |= {f"end{i}": np.array([i * HIDDEN], np.int64) for i in range(count + 1)} | {
            "axis": np.zeros(1, np.int64)
        }
    initial = ["h", "c"][: 2 if op == "LSTM" else 1] if states else []
    inputs = ["x", "w", "r", "b", *([""] if states else []), *initial]
    reset = {"linear_before_reset": 1} if op == "GRU" else {}
    attributes: dict[str, Any] = {"hidden_size": HIDDEN, "direction": direction, **reset, **given}
    nodes.append(helper.make_node(op, inputs, ["y", *(f"last_{name}" for name in initial)], name="layer", **attributes))
    edges = [graphs.edge(name, [directions, "batch", HIDDEN]) for name in initial]
    lasts = [graphs.edge(f"last_{name}", [directions, "batch", HIDDEN]) for name in initial]
    outputs = [graphs.edge("y", [STEPS, directions, "batch", HIDDEN]), *lasts]
    own = [graphs.initializer(*each) for each in weights.items()]
    return graphs.model(nodes, [graphs.edge("x", [STEPS, "batch", INPUTS]), *edges], outputs, own)


def fed(proto: ModelProto) -> dict[str, Any]:
    shapes = {each.name: [d.dim_value or 3 for d in each.type.tensor_type.shape.dim] for each in proto.graph.input}
    return {name: graphs.values(*shape, seed=len(name) + 40) for name, shape in shapes.items()}


@pytest.mark.parametrize("op", ["LSTM", "GRU"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("apart", "states"), [(False, True), (False, False), (True, True)])
def test_a_layer_becomes_one_node_on_its_stored_weights_with_the_same_outputs(
    op: str, direction: str, apart: bool, states: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = layer(op, direction, apart=apart, states=states)
    made = lower(tmp_path / "m" / "1", proto)
    (node,) = ours(made)
    two = apart and direction == "bidirectional"
    assert (node.name, node.op_type) == ("layer", f"{op}{'2' if two else ''}")
    others = [(each.op_type, *each.input) for each in made.graph("cpu").node if each is not node and each.domain == ""]
    assert {*others} <= {("Cast", "b")}  # no weight is reordered or widened
    gained = on_cpu(made.artifact.manifest)
    assert gained is not None
    assert gained.memory < 0.52
    feeds = fed(proto)
    expected = made.run_source(feeds)
    own = made.run_kernel(feeds, "cpu")
    monkeypatch.setenv(VARIABLE, "off")
    inlined = load(made.artifact, "cpu").run(feeds)
    for name in expected:
        np.testing.assert_allclose(own[name], expected[name], rtol=0, atol=0.02)  # the weights are rounded
    for name in expected:
        np.testing.assert_allclose(own[name], inlined[name], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("op", "given"),
    [
        ("LSTM", {"clip": 1.0}),
        ("LSTM", {"input_forget": 1}),
        ("LSTM", {"activations": ["Sigmoid", "Relu", "Tanh"]}),
        ("GRU", {"linear_before_reset": 0}),
    ],
    ids=str,
)
def test_a_layer_that_computes_otherwise_stays(op: str, given: dict[str, Any], tmp_path: Path) -> None:
    assert ours(lower(tmp_path / "m" / "1", layer(op, **given))) == []


def test_the_activations_by_default_may_be_named(tmp_path: Path) -> None:
    named = layer("LSTM", "bidirectional", activations=["Sigmoid", "Tanh", "Tanh"] * 2)
    assert [node.op_type for node in ours(lower(tmp_path / "m" / "1", named))] == ["LSTM"]


@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_cpu_bf16_rounds_x_and_h_unless_the_layer_is_kept(op: str, tmp_path: Path) -> None:
    """The results differ from those of ``cpu`` by roundings to bf16, and by no more."""
    profiles, proto = ("cpu", "cpu-bf16"), layer(op)
    made = lower(tmp_path / "m" / "1", proto, profiles=profiles)
    assert [node.op_type for node in ours(made, "cpu-bf16")] == [f"{op}Bf16"]
    own, rounded = (made.run_kernel(fed(proto), profile)["y"] for profile in profiles)
    assert 1e-4 < np.abs(rounded - own).max() < 0.02
    kept = lower(tmp_path / "k" / "1", proto, profiles=profiles, islands=Islands(nodes={"layer": "kept"}))
    assert [node.op_type for node in ours(kept, "cpu-bf16")] == [op]
