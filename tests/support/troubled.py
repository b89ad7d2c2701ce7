"""Small models in which bf16 does harm at one known node, for tests of the diagnosis and of the remedies."""

from __future__ import annotations

import failing
import numpy as np
from failing import WIDTH, node, square, whole
from onnx import ModelProto


def cancellation() -> ModelProto:
    """Return a model of two products (``left``, ``right``) whose ``difference`` is 2^-12 of either."""
    return failing.cancellation().proto


def offset() -> ModelProto:
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


def overflow() -> ModelProto:
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
