"""Every value in a graph gets a dtype, and a shape if it can be known, also after operators of other domains."""

from __future__ import annotations

import onnx_ir as ir
from onnx import ModelProto, helper

import graphs
from converter.graph.names import values_of
from converter.graph.step import run
from converter.graph.types import InferTypes


def _untyped(proto: ModelProto) -> list[str]:
    model = run([InferTypes()], ir.from_proto(proto))
    return [value.name or "" for value in values_of(model.graph) if value.dtype is None]


def _chain(*ops: str, domain: str) -> ModelProto:
    """Return x [batch, 16] → MatMul → each of ``ops``, with a Relu after it → y."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["v0"])]
    for place, op in enumerate(ops):
        nodes.append(helper.make_node(op, [f"v{place}"], [f"u{place}"], domain=domain))
        nodes.append(helper.make_node("Relu", [f"u{place}"], [f"v{place + 1}"]))
    nodes.append(helper.make_node("Identity", [f"v{len(ops)}"], ["y"]))
    edges = [graphs.edge("x", ["batch", 16])], [graphs.edge("y", ["batch", 16])]
    proto = graphs.model(nodes, *edges, [graphs.initializer("w", graphs.values(16, 16))])
    proto.opset_import.append(helper.make_opsetid(domain, 1))
    return proto


def test_types_after_com_microsoft_and_ai_onnx_ml_operators_are_inferred() -> None:
    for domain, ops in (("com.microsoft", ("Gelu", "QuickGelu", "FastGelu")), ("ai.onnx.ml", ("Scaler", "Normalizer"))):
        proto = _chain(*ops, domain=domain)
        model = run([InferTypes()], ir.from_proto(proto))
        assert _untyped(proto) == []
        shapes = {value.name: value.shape for value in values_of(model.graph)}
        assert shapes["u1"] == shapes["v2"] == ir.Shape(["batch", 16])


def test_a_weight_determines_the_type_of_a_product_of_another_domain() -> None:
    proto = graphs.model(
        [
            helper.make_node("Spell", ["x"], ["unknown"], domain="com.example"),
            helper.make_node("FusedMatMul", ["unknown", "w"], ["m"], domain="com.microsoft"),
            helper.make_node("Relu", ["m"], ["y"]),
        ],
        [graphs.edge("x", ["batch", 16])],
        [graphs.edge("y", ["batch", 16])],
        [graphs.initializer("w", graphs.values(16, 16))],
    )
    proto.opset_import.extend([helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("com.example", 1)])
    assert _untyped(proto) == ["unknown"]  # the output type of Spell cannot be known
