from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from peaks import measured_alone

import graphs
from converter.rewrite.matching import Match, match


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
from converter.graph.initializers import ComputedTensor, rows_of
from converter.rewrite import prepare
from converter.process.memory import map_large_blocks
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
