"""Small models in which bf16 does harm at one known node, for tests of the diagnosis and of the remedies."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper

import graphs

WIDTH = 64


def _node(op: str, inputs: str, output: str, name: str, **attributes: Any) -> NodeProto:
    return helper.make_node(op, inputs.split(), [output], name=name, **attributes)


def _model(nodes: list[NodeProto], *rest: int | str, **weights: graphs.Array) -> ModelProto:
    shape = ["batch", *rest, WIDTH]
    held = [graphs.initializer(name, array) for name, array in weights.items()]
    return graphs.model(nodes, [graphs.edge("x", shape)], [graphs.edge("y", shape)], held)


def _square(seed: int) -> graphs.Array:
    return graphs.values(WIDTH, WIDTH, seed=seed)


def cancellation(bits: int = 12) -> ModelProto:
    """Return a model of two products (``left``, ``right``) with nearly equal weights.

    Their ``difference`` is 2^-``bits`` of either product.
    """
    weight = _square(1)
    nodes = [
        _node("MatMul", "x w0", "m0", "first"),
        _node("Relu", "m0", "h", "relu"),
        _node("MatMul", "h w1", "a", "left"),
        _node("MatMul", "h w2", "b", "right"),
        _node("Sub", "a b", "d", "difference"),
        _node("MatMul", "d w3", "y", "last"),
    ]
    other = np.asarray(weight + _square(2) * 2.0**-bits, np.float32)
    return _model(nodes, w0=_square(0), w1=weight, w2=other, w3=_square(3))


def offset() -> ModelProto:
    """Return a model that adds 4096 (``raise``) and subtracts it (``lower``). Only bf16 activations lose digits."""
    nodes = [
        _node("MatMul", "x w0", "m0", "first"),
        _node("Add", "m0 big", "h", "raise"),
        _node("Sub", "h big", "d", "lower"),
        _node("MatMul", "d w1", "y", "last"),
    ]
    return _model(nodes, w0=_square(0), w1=_square(1), big=np.full(WIDTH, 4096, np.float32))


def sharp_softmax() -> ModelProto:
    """Return attention with logits in the hundreds: ``softmax`` turns an absolute error of 1 into a relative one."""
    nodes = [
        _node("MatMul", "x w0", "q", "query"),
        _node("MatMul", "x w1", "k", "key"),
        _node("Transpose", "k", "kt", "turn", perm=[0, 2, 1]),
        _node("MatMul", "q kt", "s", "scores"),
        _node("Mul", "s scale", "l", "sharpen"),
        _node("Softmax", "l", "p", "softmax", axis=-1),
        _node("MatMul", "x w2", "v", "value"),
        _node("MatMul", "p v", "y", "mix"),
    ]
    weights = {f"w{seed}": _square(seed) for seed in range(3)}
    return _model(nodes, "seq", scale=np.array(25, np.float32), **weights)


def overflow() -> ModelProto:
    """Return a model that computes 3.4e38 (``explode``), which overflows bf16 but not fp32, and then ``shrink``s it."""
    nodes = [
        _node("MatMul", "x w0", "m0", "first"),
        _node("Sub", "m0 m0", "z", "nothing"),
        _node("Exp", "z", "e", "one"),
        _node("Mul", "e large", "l", "grow"),
        _node("Mul", "l more", "o", "explode"),
        _node("Mul", "o little", "s", "shrink"),
        _node("MatMul", "s w1", "y", "last"),
    ]
    factors = {
        name: np.array(value, np.float32) for name, value in (("large", 2.0**127), ("more", 1.998), ("little", 1e-38))
    }
    return _model(nodes, w0=_square(0), w1=_square(1), **factors)
