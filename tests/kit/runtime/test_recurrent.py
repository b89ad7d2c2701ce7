"""``bf16kit::LSTM…`` and ``GRU…`` in real sessions: wrong attributes, weights and inputs are refused by name."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

import graphs
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.ort import kernel
from bf16kit.runtime.ort.onnx import OnnxRuntime

pytestmark = pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
INPUTS, HIDDEN = 5, 3
GIVEN: dict[str, Any] = {"hidden": HIDDEN, "inputs": INPUTS, "gates": "iofc", "direction": "forward"}


def model(op: str = "LSTM", *, without: str = "", **edits: Any) -> ModelProto:
    """Return x [steps, batch, any], h → y of a node that only the kernel can run, with edited attributes."""
    shapes = {"w": (1, 4 * HIDDEN, INPUTS), "r": (1, 4 * HIDDEN, HIDDEN)}
    weights = [numpy_helper.from_array(graphs.values(*s).astype(ml_dtypes.bfloat16), n) for n, s in shapes.items()]
    taken = ["x", "w", "r", "", "h"] if op == "LSTM" else ["x", "w", "w", "r", "r"]
    attributes = {name: value for name, value in (GIVEN | edits).items() if name != without}
    node = helper.make_node(op, taken, ["y"], name="layer", domain=kernel.DOMAIN)
    node.attribute.extend(helper.make_attribute(*each) for each in attributes.items())
    edges = [graphs.edge("x", ["steps", "batch", "width"]), graphs.edge("h")]
    made = graphs.model([node], edges, [graphs.edge("y", ["steps", "d", "batch", "units"])], weights)
    made.opset_import.append(helper.make_opsetid(kernel.DOMAIN, 1))
    return made


def session(made: ModelProto) -> OnnxRuntime:
    inputs = [TensorSpec("x", "float32", ("s", "b", "w")), TensorSpec("h", "float32", ("d", "b", "u"))]
    outputs = [TensorSpec("y", "float32", ("s", "d", "b", "u"))]
    return OnnxRuntime(made.SerializeToString(), inputs, outputs, name="recurrent")


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({"hidden": 0}, "attribute hidden is 0; it must be between 1"),
        ({"hidden": 2**30}, f"attribute hidden is {2**30}; it must be at most {2**20}"),
        ({"hidden": HIDDEN + 1}, r"the weight, input 1, has \d+ elements"),
        ({"inputs": INPUTS + 1}, r"the weight, input 1, has \d+ elements"),
        ({"gates": "cofi"}, 'attribute gates is "cofi"; it must be one of: iofc, ifco'),
        ({"direction": "both"}, 'attribute direction is "both"; it must be one of: forward, reverse, bidirectional'),
        ({"direction": "bidirectional"}, r"the weight, input 1, has \d+ elements"),
        *(({"without": name}, f"attribute {name} is missing") for name in GIVEN),
        ({"op": "LSTM2"}, 'LSTM2 has two directions; attribute direction must be "bidirectional"'),
    ],
    ids=str,
)
def test_wrong_attributes_are_refused_at_load(edits: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeFailure, match=words):
        session(model(**edits))


@pytest.mark.parametrize(
    ("x", "h", "words"),
    [
        ((4, 2, INPUTS + 1), (1, 2, HIDDEN), rf"it must be \[steps, batch, {INPUTS}\]"),
        ((4, 2, INPUTS), (1, 1, HIDDEN), "dimension 1 of the initial h is 1; it must be 2"),
        ((4, 2, INPUTS), (2, 1, HIDDEN), "dimension 0 of the initial h is 2; it must be 1"),
        ((4, 2, INPUTS), (2, HIDDEN), "the initial h has 2 dimensions; it must have 3"),
    ],
    ids=str,
)
def test_inputs_of_other_shapes_are_refused(x: tuple[int, ...], h: tuple[int, ...], words: str) -> None:
    with pytest.raises(RuntimeFailure, match=words):
        session(model()).run({"x": np.zeros(x, np.float32), "h": np.zeros(h, np.float32)})


@pytest.mark.parametrize("shape", [(0, 2), (4, 0), (0, 0)], ids=str)
def test_no_steps_and_no_rows_give_an_empty_result(shape: tuple[int, int]) -> None:
    fed = {"x": np.zeros((*shape, INPUTS), np.float32), "h": np.zeros((1, shape[1], HIDDEN), np.float32)}
    assert session(model()).run(fed)["y"].shape == (shape[0], 1, shape[1], HIDDEN)


def test_no_steps_of_more_rows_than_memory_holds_give_an_empty_result() -> None:
    made = model()
    del made.graph.node[0].input[3:]  # without the initial h
    fed = {"x": np.zeros((0, 2**58, INPUTS), np.float32), "h": np.zeros((1, 1, HIDDEN), np.float32)}
    assert session(made).run(fed)["y"].shape == (0, 1, 2**58, HIDDEN)
