"""Small models in which bf16 does harm at known nodes and weights."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

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


def whole(nodes: str, *rest: str, **weights: graphs.Array) -> ModelProto:
    """Return the model of ``nodes`` in ONNX's text form, whose input x and output y are [batch, ``rest``, WIDTH]."""
    shape = ", ".join(["batch", *rest, str(WIDTH)])
    return graphs.parsed(f"(float[{shape}] x) => (float[{shape}] y) {{ {nodes} }}", **weights)


def _failing(proto: ModelProto, nodes: Collection[str], weights: Collection[str] = ()) -> Failing:
    feeds = [{"x": noise(4, WIDTH, seed=10 + seed)} for seed in range(4)]
    return Failing(proto, feeds, frozenset(nodes), frozenset(weights))


def cancellation() -> Failing:
    """h·w1 − h·w2, where w2 differs from w1 by about one part in 2^12, between two layers that bf16 does not harm."""
    w1 = square(1)
    w2 = (w1 * (1 + 2.0**-12 * noise(WIDTH, WIDTH, seed=2))).astype(np.float32)
    proto = whole(
        """[first] m = MatMul (x, w0) [relu] h = Relu (m) [left] a = MatMul (h, w1) [right] b = MatMul (h, w2)
        [difference] d = Sub (a, b) [last] y = MatMul (d, w3)""",
        w0=square(0),
        w1=w1,
        w2=w2,
        w3=square(3),
    )
    return _failing(proto, ("left", "right", "difference"), ("w1", "w2"))


def overflow() -> Failing:
    """Inputs near 3.4e38, the largest fp32 number, which bf16 rounds to infinity; the first node scales them down."""
    proto = whole(
        "[scale] s = Mul (x, tiny) [first] m = MatMul (s, w0) [relu] h = Relu (m) [last] y = MatMul (h, w1)",
        tiny=np.array(1e-38, np.float32),
        w0=square(0),
        w1=square(1),
    )
    found = _failing(proto, ("scale",))
    for feed in found.feeds:
        feed["x"] = np.clip(1e38 * feed["x"], -3.4e38, 3.4e38)
    found.feeds[1]["x"][0, 0] = 3.4e38
    return found


def softmax() -> Failing:
    """Logits of some hundreds that differ by one or two, which is the resolution of bf16 for such numbers."""
    proto = whole(
        "[logits] l = MatMul (x, w0) [softmax] p = Softmax (l) [mix] m = MatMul (p, w1) [last] y = MatMul (m, w2)",
        w0=300 * graphs.values(WIDTH, 1) + square(3),
        w1=square(1),
        w2=square(2),
    )
    return _failing(proto, ("logits", "softmax"), ("w0",))


def offset() -> Failing:
    """Logits of one or two to which 4096 is added, as some masks do: an Add and a Softmax, with little arithmetic."""
    proto = whole(
        "[logits] m = MatMul (x, w0) [sum] a = Add (m, offset) [softmax] p = Softmax (a) [last] y = MatMul (p, w1)",
        offset=np.full(WIDTH, 4096, np.float32),
        w0=square(0),
        w1=square(1),
    )
    return _failing(proto, ("sum", "softmax"))


def lstm(steps: int = STEPS) -> Failing:
    """A cell whose forget gates are σ(40.125 − 34). Rounded to σ(40 − 34), it forgets an eighth faster at each step."""
    hidden, random = 32, np.random.default_rng(0)
    w = np.zeros((1, 4, hidden, 16), np.float32)  # gates: input, output, forget, cell
    w[0, 0, :, 0] = -6
    w[0, 2, :, 0], w[0, 2, :, 1] = 40.125, -34
    w[0, 3, :, 2:] = random.standard_normal((hidden, 14)) / 4
    proto = graphs.parsed(
        f"""(float[{steps}, batch, 16] x) => (float[batch, 16] y) {{
            [lstm] unread, h = LSTM <hidden_size = {hidden}> (x, w, r) [squeeze] s = Squeeze (h, axis)
            [last] y = MatMul (s, v)
        }}""",
        w=w.reshape(1, 4 * hidden, 16),
        r=graphs.values(1, 4 * hidden, hidden, seed=1) / 100,
        v=graphs.values(hidden, 16, seed=2),
        axis=np.array([0]),
    )
    proto.graph.node[0].output[0] = ""
    feeds = []
    for seed in range(3):
        x = np.repeat(noise(1, 2, 16, seed=10 + seed), steps, axis=0)
        x[:, :, :2] = 1
        feeds.append({"x": x})
    return Failing(proto, feeds, frozenset(), frozenset({"w"}))


def raised_and_lowered() -> ModelProto:
    """Return a model that adds 4096 (``raise``) and subtracts it (``lower``). Only bf16 activations lose digits."""
    return whole(
        "[first] m = MatMul (x, w0) [raise] h = Add (m, big) [lower] d = Sub (h, big) [last] y = MatMul (d, w1)",
        w0=square(0),
        w1=square(1),
        big=np.full(WIDTH, 4096, np.float32),
    )


def sharp_softmax() -> ModelProto:
    """Return attention with logits in the hundreds: ``softmax`` turns an absolute error of 1 into a relative one."""
    return whole(
        """[query] q = MatMul (x, w0) [key] k = MatMul (x, w1) [turn] t = Transpose <perm = [0, 2, 1]> (k)
        [scores] s = MatMul (q, t) [sharpen] l = Mul (s, scale) [softmax] p = Softmax <axis = -1> (l)
        [value] v = MatMul (x, w2) [mix] y = MatMul (p, v)""",
        "seq",
        scale=np.array(25, np.float32),
        **{f"w{seed}": square(seed) for seed in range(3)},
    )


def inner_overflow() -> ModelProto:
    """Return a model that computes 3.4e38 (``explode``), which overflows bf16 but not fp32, and then ``shrink``s it."""
    return whole(
        """[first] m = MatMul (x, w0) [nothing] z = Sub (m, m) [one] e = Exp (z) [grow] l = Mul (e, large)
        [explode] o = Mul (l, more) [shrink] s = Mul (o, little) [last] y = MatMul (s, w1)""",
        w0=square(0),
        w1=square(1),
        large=np.array(2.0**127, np.float32),
        more=np.array(1.998, np.float32),
        little=np.array(1e-38, np.float32),
    )
