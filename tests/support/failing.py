"""Models that are over budget in bf16, each with the nodes and weights that cause it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper

import graphs

Array = NDArray[np.float32]

WIDTH = 64
STEPS = 1000


@dataclass(frozen=True)
class Failing:
    """A model and its inputs. ``nodes`` must stay fp32 in the profile cuda, and ``weights`` in the profile cpu."""

    proto: ModelProto
    feeds: list[dict[str, Array]]
    nodes: frozenset[str]
    weights: frozenset[str]


def noise(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def cancellation() -> Failing:
    """h·w1 − h·w2, where w2 differs from w1 by about one part in 2^12, between two layers that bf16 does not harm."""
    w1 = graphs.values(WIDTH, WIDTH, seed=1)
    w2 = (w1 * (1 + 2.0**-12 * noise(WIDTH, WIDTH, seed=2))).astype(np.float32)
    proto = graphs.model(
        [
            helper.make_node("MatMul", ["x", "w0"], ["m"], name="first"),
            helper.make_node("Relu", ["m"], ["h"], name="relu"),
            helper.make_node("MatMul", ["h", "w1"], ["a"], name="left"),
            helper.make_node("MatMul", ["h", "w2"], ["b"], name="right"),
            helper.make_node("Sub", ["a", "b"], ["d"], name="difference"),
            helper.make_node("MatMul", ["d", "w3"], ["y"], name="last"),
        ],
        [graphs.edge("x", ["batch", WIDTH])],
        [graphs.edge("y", ["batch", WIDTH])],
        [
            graphs.initializer("w0", graphs.values(WIDTH, WIDTH)),
            graphs.initializer("w1", w1),
            graphs.initializer("w2", w2),
            graphs.initializer("w3", graphs.values(WIDTH, WIDTH, seed=3)),
        ],
    )
    return Failing(proto, _rows(), frozenset({"left", "right", "difference"}), frozenset({"w1", "w2"}))


def overflow() -> Failing:
    """Inputs near 3.4e38, the largest fp32 number, which bf16 rounds to infinity; the first node scales them down."""
    proto = graphs.model(
        [
            helper.make_node("Mul", ["x", "tiny"], ["s"], name="scale"),
            helper.make_node("MatMul", ["s", "w0"], ["m"], name="first"),
            helper.make_node("Relu", ["m"], ["h"], name="relu"),
            helper.make_node("MatMul", ["h", "w1"], ["y"], name="last"),
        ],
        [graphs.edge("x", ["batch", WIDTH])],
        [graphs.edge("y", ["batch", WIDTH])],
        [
            graphs.initializer("tiny", np.array(1e-38, np.float32)),
            graphs.initializer("w0", graphs.values(WIDTH, WIDTH)),
            graphs.initializer("w1", graphs.values(WIDTH, WIDTH, seed=1)),
        ],
    )
    feeds = [{"x": np.clip(1e38 * feed["x"], -3.4e38, 3.4e38)} for feed in _rows()]
    feeds[1]["x"][0, 0] = 3.4e38
    return Failing(proto, feeds, frozenset({"scale"}), frozenset())


def softmax() -> Failing:
    """Logits of some hundreds that differ by one or two, which is the resolution of bf16 for such numbers."""
    common = 300 * graphs.values(WIDTH, 1)
    proto = graphs.model(
        [
            helper.make_node("MatMul", ["x", "w0"], ["logits"], name="logits"),
            helper.make_node("Softmax", ["logits"], ["p"], name="softmax"),
            helper.make_node("MatMul", ["p", "w1"], ["m"], name="mix"),
            helper.make_node("MatMul", ["m", "w2"], ["y"], name="last"),
        ],
        [graphs.edge("x", ["batch", WIDTH])],
        [graphs.edge("y", ["batch", WIDTH])],
        [
            graphs.initializer("w0", common + graphs.values(WIDTH, WIDTH, seed=3)),
            graphs.initializer("w1", graphs.values(WIDTH, WIDTH, seed=1)),
            graphs.initializer("w2", graphs.values(WIDTH, WIDTH, seed=2)),
        ],
    )
    return Failing(proto, _rows(), frozenset({"logits", "softmax"}), frozenset({"w0"}))


def offset() -> Failing:
    """Logits of one or two to which 4096 is added, as some masks do: an Add and a Softmax, with little arithmetic."""
    proto = graphs.model(
        [
            helper.make_node("MatMul", ["x", "w0"], ["m"], name="logits"),
            helper.make_node("Add", ["m", "offset"], ["a"], name="sum"),
            helper.make_node("Softmax", ["a"], ["p"], name="softmax"),
            helper.make_node("MatMul", ["p", "w1"], ["y"], name="last"),
        ],
        [graphs.edge("x", ["batch", WIDTH])],
        [graphs.edge("y", ["batch", WIDTH])],
        [
            graphs.initializer("offset", np.full(WIDTH, 4096, np.float32)),
            graphs.initializer("w0", graphs.values(WIDTH, WIDTH)),
            graphs.initializer("w1", graphs.values(WIDTH, WIDTH, seed=1)),
        ],
    )
    return Failing(proto, _rows(), frozenset({"sum", "softmax"}), frozenset())


def lstm(steps: int = STEPS) -> Failing:
    """A cell whose forget gates are σ(40.125 − 34). Rounded to σ(40 − 34), it forgets an eighth faster at each step."""
    hidden, random = 32, np.random.default_rng(0)
    w = np.zeros((1, 4, hidden, 16), np.float32)  # gates: input, output, forget, cell
    w[0, 0, :, 0] = -6
    w[0, 2, :, 0], w[0, 2, :, 1] = 40.125, -34
    w[0, 3, :, 2:] = random.standard_normal((hidden, 14)) / 4
    proto = graphs.model(
        [
            helper.make_node("LSTM", ["x", "w", "r"], ["", "h"], name="lstm", hidden_size=hidden),
            helper.make_node("Squeeze", ["h", "axis"], ["s"], name="squeeze"),
            helper.make_node("MatMul", ["s", "v"], ["y"], name="last"),
        ],
        [graphs.edge("x", [steps, "batch", 16])],
        [graphs.edge("y", ["batch", 16])],
        [
            graphs.initializer("w", w.reshape(1, 4 * hidden, 16)),
            graphs.initializer("r", graphs.values(1, 4 * hidden, hidden, seed=1) / 100),
            graphs.initializer("v", graphs.values(hidden, 16, seed=2)),
            graphs.initializer("axis", np.array([0])),
        ],
    )
    feeds = []
    for seed in range(3):
        x = np.repeat(noise(1, 2, 16, seed=10 + seed), steps, axis=0)
        x[:, :, :2] = 1
        feeds.append({"x": x})
    return Failing(proto, feeds, frozenset(), frozenset({"w"}))


def _rows() -> list[dict[str, Array]]:
    return [{"x": noise(4, WIDTH, seed=10 + seed)} for seed in range(4)]
