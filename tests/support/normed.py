"""Residual sums that are normalised, as exporters write them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper

import graphs

Array = NDArray[Any]
WIDTH = 40


def residual(
    *, bias: bool = True, summed: bool = False, skip: tuple[Any, ...] = ("batch", "seq", WIDTH), **norm: Any
) -> ModelProto:
    """x and skip → LayerNormalization(x + skip), times 2 → y; and the sum, negated, where it is wanted."""
    nodes = [
        helper.make_node("Add", ["x", "skip"], ["s"], name="add"),
        helper.make_node("LayerNormalization", ["s", "w", *(["b"] if bias else [])], ["n"], name="norm", **norm),
        helper.make_node("Abs", ["n"], ["y"], name="abs"),
    ]
    outputs = [graphs.edge("y", ["batch", "seq", WIDTH])]
    if summed:
        nodes.insert(1, helper.make_node("Neg", ["s"], ["t"], name="neg"))
        outputs.append(graphs.edge("t", ["batch", "seq", WIDTH]))
    weights = [graphs.initializer(name, graphs.values(WIDTH, seed=i)) for i, name in enumerate("wb")]
    return graphs.model(nodes, [graphs.edge("x", ["batch", "seq", WIDTH]), graphs.edge("skip", skip)], outputs, weights)


def feeds() -> dict[str, Array]:
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal((2, 3, WIDTH), np.float32) for name in ("x", "skip")}
