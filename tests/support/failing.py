"""Small models in which bf16 does harm at known nodes and weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper

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


def square(seed: int) -> Array:
    return graphs.values(WIDTH, WIDTH, seed=seed)


def node(op: str, inputs: str, output: str, name: str, **attributes: Any) -> NodeProto:
    return helper.make_node(op, inputs.split(), [output], name=name, **attributes)


def whole(nodes: Sequence[NodeProto], *rest: int | str, **weights: graphs.Array) -> ModelProto:
    """Return the model of ``nodes``, whose input x and output y are [batch, ``rest``, WIDTH]."""
    shape = ["batch", *rest, WIDTH]
    held = [graphs.initializer(name, array) for name, array in weights.items()]
    return graphs.model(nodes, [graphs.edge("x", shape)], [graphs.edge("y", shape)], held)


def _failing(proto: ModelProto, nodes: Collection[str], weights: Collection[str] = ()) -> Failing:
    feeds = [{"x": noise(4, WIDTH, seed=10 + seed)} for seed in range(4)]
    return Failing(proto, feeds, frozenset(nodes), frozenset(weights))


def cancellation() -> Failing:
    """h·w1 − h·w2, where w2 differs from w1 by about one part in 2^12, between two layers that bf16 does not harm."""
    w1 = square(1)
    nodes = [
        node("MatMul", "x w0", "m", "first"),
        node("Relu", "m", "h", "relu"),
        node("MatMul", "h w1", "a", "left"),
        node("MatMul", "h w2", "b", "right"),
        node("Sub", "a b", "d", "difference"),
        node("MatMul", "d w3", "y", "last"),
    ]
    w2 = (w1 * (1 + 2.0**-12 * noise(WIDTH, WIDTH, seed=2))).astype(np.float32)
    return _failing(
        whole(nodes, w0=square(0), w1=w1, w2=w2, w3=square(3)), ("left", "right", "difference"), ("w1", "w2")
    )


def overflow() -> Failing:
    """Inputs near 3.4e38, the largest fp32 number, which bf16 rounds to infinity; the first node scales them down."""
    nodes = [
        node("Mul", "x tiny", "s", "scale"),
        node("MatMul", "s w0", "m", "first"),
        node("Relu", "m", "h", "relu"),
        node("MatMul", "h w1", "y", "last"),
    ]
    found = _failing(whole(nodes, tiny=np.array(1e-38, np.float32), w0=square(0), w1=square(1)), ("scale",))
    for feed in found.feeds:
        feed["x"] = np.clip(1e38 * feed["x"], -3.4e38, 3.4e38)
    found.feeds[1]["x"][0, 0] = 3.4e38
    return found


def softmax() -> Failing:
    """Logits of some hundreds that differ by one or two, which is the resolution of bf16 for such numbers."""
    nodes = [
        node("MatMul", "x w0", "logits", "logits"),
        node("Softmax", "logits", "p", "softmax"),
        node("MatMul", "p w1", "m", "mix"),
        node("MatMul", "m w2", "y", "last"),
    ]
    w0 = 300 * graphs.values(WIDTH, 1) + square(3)
    return _failing(whole(nodes, w0=w0, w1=square(1), w2=square(2)), ("logits", "softmax"), ("w0",))


def offset() -> Failing:
    """Logits of one or two to which 4096 is added, as some masks do: an Add and a Softmax, with little arithmetic."""
    nodes = [
        node("MatMul", "x w0", "m", "logits"),
        node("Add", "m offset", "a", "sum"),
        node("Softmax", "a", "p", "softmax"),
        node("MatMul", "p w1", "y", "last"),
    ]
    return _failing(
        whole(nodes, offset=np.full(WIDTH, 4096, np.float32), w0=square(0), w1=square(1)), ("sum", "softmax")
    )


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


def raised_and_lowered() -> ModelProto:
    """Return a model that adds 4096 (``raise``) and subtracts it (``lower``). Only bf16 activations lose digits."""
    nodes = [
        node("MatMul", "x w0", "m0", "first"),
        node("Add", "m0 big", "h", "raise"),
        node("Sub", "h big", "d", "lower"),
        node("MatMul", "d w1", "y", "last"),
    ]
    return whole(nodes, w0=square(0), w1=square(1), big=np.full(WIDTH, 4096, np.float32))


def sharp_softmax() -> ModelProto:
    """Return attention with logits in the hundreds: ``softmax`` turns an absolute error of 1 into a relative one."""
    nodes = [
        node("MatMul", "x w0", "q", "query"),
        node("MatMul", "x w1", "k", "key"),
        node("Transpose", "k", "kt", "turn", perm=[0, 2, 1]),
        node("MatMul", "q kt", "s", "scores"),
        node("Mul", "s scale", "l", "sharpen"),
        node("Softmax", "l", "p", "softmax", axis=-1),
        node("MatMul", "x w2", "v", "value"),
        node("MatMul", "p v", "y", "mix"),
    ]
    weights = {f"w{seed}": square(seed) for seed in range(3)}
    return whole(nodes, "seq", scale=np.array(25, np.float32), **weights)


def inner_overflow() -> ModelProto:
    """Return a model that computes 3.4e38 (``explode``), which overflows bf16 but not fp32, and then ``shrink``s it."""
    nodes = [
        node("MatMul", "x w0", "m0", "first"),
        node("Sub", "m0 m0", "z", "nothing"),
        node("Exp", "z", "e", "one"),
        node("Mul", "e large", "l", "grow"),
        node("Mul", "l more", "o", "explode"),
        node("Mul", "o little", "s", "shrink"),
        node("MatMul", "s w1", "y", "last"),
    ]
    factors = {"large": 2.0**127, "more": 1.998, "little": 1e-38}
    held = {name: np.array(value, np.float32) for name, value in factors.items()}
    return whole(nodes, w0=square(0), w1=square(1), **held)
