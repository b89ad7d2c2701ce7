"""One layer of a network as exporters write it, a product and its activation, for tests of what replaces it."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from lowered import Lowered
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator

import graphs
from bf16kit.runtime.loading import load
from bf16kit.runtime.ort.kernel import VARIABLE

Array = NDArray[Any]

K = 40
# Nodes as (operator, inputs -> output, attributes), where s is the sum and y the result; and the function they compute.
ACTIVATIONS: dict[str, tuple[list[tuple[str, str, dict[str, Any]]], Callable[[Array], Array]]] = {
    "none": ([], lambda s: s),
    "relu": ([("Relu", "s -> y", {})], lambda s: np.maximum(s, 0)),
    "gelu": ([("Gelu", "s -> y", {})], lambda s: 0.5 * s * (1 + np.vectorize(math.erf)(s / math.sqrt(2)))),
    "gelu_tanh": (
        [("Gelu", "s -> y", {"approximate": "tanh"})],
        lambda s: 0.5 * s * (1 + np.tanh(math.sqrt(2 / math.pi) * (s + 0.044715 * s**3))),
    ),
    "silu": ([("Sigmoid", "s -> g", {}), ("Mul", "s g -> y", {})], lambda s: s / (1 + np.exp(-s))),
}


def layer(n: int, layout: str, *, bias: bool, activation: str) -> ModelProto:
    """Return the model x [batch, seq, K] → a product of ``n`` columns, with or without bias ``b``, an activation → y.

    The weight ``w`` is [K, n]. With the layout ``transposed`` it is [n, K], and a Gather also looks up ``ids`` in it.
    """
    after, _ = ACTIVATIONS[activation]
    tied, total = layout == "transposed", "s" if after else "y"
    nodes, outputs = [], [graphs.edge("y", ["batch", "seq", n])]
    weight = graphs.values(K, n, seed=1)
    if tied:
        nodes.append(helper.make_node("Gather", ["w", "ids"], ["picked"], name="lookup", axis=1))
        nodes.append(helper.make_node("Transpose", ["w"], ["t"], name="turn", perm=[1, 0]))
        outputs.append(graphs.edge("picked", [n, "count"]))
        weight = np.ascontiguousarray(weight.T)
    product = helper.make_node("MatMul", ["x", "t" if tied else "w"], ["m" if bias else total], name="product")
    nodes.append(product)
    if bias:
        nodes.append(helper.make_node("Add", ["m", "b"], [total], name="add"))
    for op, wires, attributes in after:
        inputs, output = (side.split() for side in wires.split("->"))
        nodes.append(helper.make_node(op, inputs, output, name=op.lower(), **attributes))
    return graphs.model(
        nodes,
        [graphs.edge("x", ["batch", "seq", K]), graphs.edge("ids", ["count"], TensorProto.INT64)],
        outputs,
        [graphs.initializer("w", weight), graphs.initializer("b", graphs.values(n, seed=2))],
    )


def batch() -> dict[str, Array]:
    """Return inputs for a :func:`layer`."""
    return {"x": graphs.values(2, 3, K, seed=7) * 2, "ids": np.array([1, 0])}


def ours(made: Lowered, profile: str = "cpu") -> list[NodeProto]:
    """Return the nodes of the kernel in the graph of ``profile``."""
    return [node for node in made.graph(profile).node if node.domain == "bf16kit"]


def answers(
    made: Lowered, fed: Mapping[str, Array], monkeypatch: pytest.MonkeyPatch, profile: str = "cpu"
) -> list[dict[str, Array]]:
    """Return the outputs of the kernel, of its definitions in ONNX Runtime, and of these in onnx's evaluator."""
    found = [made.run_kernel(fed, profile)]
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "off")
        found.append(load(made.artifact, profile).run(fed))
    evaluated = ReferenceEvaluator(onnx.load(made.artifact.file(f"{profile}.onnx"))).run(None, dict(fed))
    return [*found, dict(zip(found[0], evaluated, strict=True))]
