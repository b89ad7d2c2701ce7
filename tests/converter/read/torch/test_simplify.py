"""The rewrite rules that clean up an exporter's graph: the conversion fails and names a rule that is missing."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import helper

import graphs
from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.tensors import TensorSpec
from converter.read.torch import simplify
from converter.read.torch.onnx_export import adapt, to_onnx


def test_every_rule_exists_in_the_installed_onnxscript() -> None:
    from onnxscript.rewriter.rules import common

    assert [name for name in simplify._RULES if not hasattr(common, name)] == []


def test_a_rule_that_was_renamed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplify, "_RULES", (*simplify._RULES, "no_such_rule"))
    with pytest.raises(ConversionError, match=r"onnxscript \S+ has no rewrite rule 'no_such_rule'"):
        simplify.simplify(ir.from_proto(graphs.mlp()))


def test_no_constant_is_folded_into_a_larger_one() -> None:
    """Swin's table of relative positions [225, 2] times a weight [2, 512] would be 40 times what it is made from."""
    nodes = [
        helper.make_node("MatMul", ["positions", "weight"], ["table"]),
        helper.make_node("ReduceSum", ["weight", "first"], ["bias"], keepdims=0),
        helper.make_node("Add", ["x", "table"], ["sum"]),
        helper.make_node("Add", ["sum", "bias"], ["y"]),
    ]
    constants = {"positions": graphs.values(225, 2), "weight": graphs.values(2, 512), "first": np.array([0])}
    proto = graphs.model(
        nodes,
        [graphs.edge("x", ["batch", 225, 512])],
        [graphs.edge("y", ["batch", 225, 512])],
        [graphs.initializer(name, array) for name, array in constants.items()],
    )
    model = ir.from_proto(proto)
    simplify.simplify(model)
    assert [node.op_type for node in model.graph] == ["MatMul", "Add", "Add"]
    assert sorted(value.shape.numpy() for value in model.graph.initializers.values() if value.shape) == [
        *((2, 512), (225, 2), (512,)),
    ]


def test_chunks_of_a_free_dimension_are_exported() -> None:
    """onnxscript's evaluator raises at their SplitToSequence."""

    class Chunked(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = torch.cat([x, -x], 1).chunk(2, 1)
            return a * b

    graph = to_onnx(adapt(Chunked().eval(), (TensorSpec("x", "float32", ("batch", "length", 8)),)), {})
    assert "SplitToSequence" in [node.op_type for node in graph.graph]
