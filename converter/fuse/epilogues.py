"""Finds the bias and the activation after a product, which the kernel can apply before the result leaves the registers.

Exporters write Gelu in a dozen ways, and none is matched by its form. A few elementwise nodes between one value and
another are a function of one variable. They are recognised by their results for numbers across its range, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from converter.fuse.products import Product, takes_bias
from converter.graph.initializers import const, dims
from converter.graph.values import constant_number, only_reader

Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu"]
Numbers = NDArray[np.float64]

_LONGEST = 12  # nodes of an activation, at most; Gelu's tanh form has eight or nine
# Inputs where activations differ most, and where their tails are.
_PROBES: Numbers = np.concatenate([np.linspace(-8, 8, 129), [-1e3, -50, -20, 20, 50, 1e3]])
# Constants are fp32: their error of 2^-24 is multiplied by about fifty in the exponent of the tanh form's tail.
_RELATIVE, _ABSOLUTE = 2e-5, 1e-7


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The ``nodes`` after a product, in order, which are not needed if the kernel does their work.

    ``bias`` is an initializer of one number per column. ``result`` is the output of the last of product and nodes.
    ``reshape`` is a Reshape between bias and activation; it stays, after the kernel's node.
    """

    bias: ir.Value | None
    activation: Activation
    nodes: tuple[ir.Node, ...]
    result: ir.Value
    reshape: ir.Node | None = None


def epilogue(product: Product) -> Epilogue:
    """Return the longest epilogue of ``product``: the nodes up to the first value that others read too."""
    result, bias = product.node.outputs[0], product.bias
    nodes: list[ir.Node] = []
    add = None if bias is not None or product.node.op_type == "Conv" else _add(product.node, product.n)
    if add is not None:
        bias = add.inputs[1] if add.inputs[0] is result else add.inputs[0]
        result = add.outputs[0]
        nodes.append(add)
    reshape = None
    activation, activated = _activation(result)
    if not activated and (moving := _reshape(result)) is not None:
        activation, activated = _activation(moving.outputs[0])
        reshape = moving if activated else None
    if activated:
        result = activated[-1].outputs[0]
    return Epilogue(bias, activation, (*nodes, *activated), result, reshape)


def _add(product: ir.Node, columns: int) -> ir.Node | None:
    """Return the Add of a bias, if it alone reads the output of ``product`` and adds no dimension."""
    given = product.outputs[0]
    node = only_reader(given)
    if node is None or node.op_type != "Add":
        return None
    bias = node.inputs[1] if node.inputs[0] is given else node.inputs[0]
    tensor = const(bias)
    rank = 1 if given.shape is None else len(given.shape)
    return node if takes_bias(bias, columns) and tensor is not None and len(dims(tensor)) <= rank else None


def _reshape(result: ir.Value) -> ir.Node | None:
    """Return the Reshape that alone reads ``result``. GPT-2 has one: it multiplies matrices and activates batches."""
    node = only_reader(result)
    return node if node is not None and node.op_type == "Reshape" and node.inputs[0] is result else None


def _activation(x: ir.Value) -> tuple[Activation, tuple[ir.Node, ...]]:
    """Return the activation that alone reads ``x``, and its nodes; ``none`` and no nodes if there is none."""
    for nodes in _regions(x):
        given = _evaluate(x, nodes)
        for name, function in _ACTIVATIONS.items():
            if np.allclose(given, function(_PROBES), rtol=_RELATIVE, atol=_ABSOLUTE):
                return name, nodes
    return "none", ()


def _regions(x: ir.Value) -> Iterator[tuple[ir.Node, ...]]:
    """Yield growing lists of nodes, in order, that compute the last one's output elementwise from ``x`` alone.

    The values between are read by no other node.
    """
    values, nodes = [x], list[ir.Node]()
    while len(nodes) < _LONGEST:
        node = next((n for n in _readers(values) if n not in nodes and _elementwise(n, values)), None)
        if node is None:
            return
        nodes.append(node)
        values.append(node.outputs[0])
        if not any(v.is_graph_output() or any(n not in nodes for n in _readers([v])) for v in values[:-1]):
            yield tuple(nodes)


def _readers(values: list[ir.Value]) -> Iterator[ir.Node]:
    for value in values:
        yield from (use.node for use in value.uses())


def _elementwise(node: ir.Node, values: list[ir.Value]) -> bool:
    """Whether ``node`` reads only ``values`` and constant numbers."""
    if node.domain != "" or node.op_type not in _FUNCTIONS or node.graph is not values[0].graph:
        return False
    return all(value in values or constant_number(value, rank=1) is not None for value in node.inputs)


def _evaluate(x: ir.Value, nodes: tuple[ir.Node, ...]) -> Numbers:
    """Return what ``nodes`` compute for the probes."""
    known: dict[ir.Value | None, Numbers] = {x: _PROBES}
    with np.errstate(all="ignore"):
        for node in nodes:
            inputs = [known[v] if v in known else np.float64(constant_number(v, rank=1) or 0.0) for v in node.inputs]
            known[node.outputs[0]] = _FUNCTIONS[node.op_type](node, *inputs)
    return known[nodes[-1].outputs[0]]


def _erf(x: Numbers) -> Numbers:
    return np.array([math.erf(value) for value in x])


def _sigmoid(x: Numbers) -> Numbers:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def _gelu(x: Numbers) -> Numbers:
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))))


def _gelu_tanh(x: Numbers) -> Numbers:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def _gelu_node(node: ir.Node, x: Numbers) -> Numbers:
    approximate = node.attributes.get("approximate")
    return _gelu_tanh(x) if approximate is not None and approximate.as_string() == "tanh" else _gelu(x)


def _swish_node(node: ir.Node, x: Numbers) -> Numbers:
    alpha = node.attributes.get("alpha")
    return x * _sigmoid(x * (1.0 if alpha is None else alpha.as_float()))


_ACTIVATIONS: Mapping[Activation, Callable[[Numbers], Numbers]] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: x * _sigmoid(x),
}

# The elementwise operators that activations are written with.
_FUNCTIONS: Mapping[str, Callable[..., Numbers]] = {
    "Add": lambda _, a, b: a + b,
    "Sub": lambda _, a, b: a - b,
    "Mul": lambda _, a, b: a * b,
    "Div": lambda _, a, b: a / b,
    "Pow": lambda _, a, b: a**b,
    "Erf": lambda _, x: _erf(x),
    "Exp": lambda _, x: np.exp(x),
    "Neg": lambda _, x: -x,
    "Reciprocal": lambda _, x: 1 / x,
    "Sigmoid": lambda _, x: _sigmoid(x),
    "Tanh": lambda _, x: np.tanh(x),
    "Relu": lambda _, x: np.maximum(x, 0),
    "Gelu": _gelu_node,
    "Swish": _swish_node,
}
