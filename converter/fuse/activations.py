"""Recognises the activation that a few elementwise nodes compute, by their structure, and writes it in a function.

Exporters write Gelu in a dozen ways: with the half first or last, divided or multiplied, distributed over the sum or
not. Each value is therefore written as a sum of products of ``x`` and functions of such sums, whose order and grouping
no longer matter. Equal sums compute the same function, whatever the numbers in x are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import onnx_ir as ir

from bf16kit.converter.graph.initializers import constant_number

Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu", "relu6"]
# Coefficients by the factors of their term, in order. A factor is a function's name with its sum, or x itself.
Factor = tuple[str, tuple[Any, ...]]
Sum = Mapping[tuple[Factor, ...], float]

_LONGEST = 12  # nodes of an activation, at most; Gelu's tanh form has eight or nine
_MOST_TERMS = 16
_DIGITS = 5  # of a coefficient: constants are fp32, and exporters write √(2/π) with as few as seven digits
_X: Factor = ("x", ())


def activation(x: ir.Value) -> tuple[Activation, tuple[ir.Node, ...]]:
    """Return the activation that alone reads ``x``, and its nodes in order; ``none`` and no nodes if there is none."""
    known: dict[ir.Value | None, Sum] = {x: {(_X,): 1.0}}
    nodes: list[ir.Node] = []
    while len(nodes) < _LONGEST:
        readers = [use.node for value in known if value is not None for use in value.uses()]
        found = next(((n, s) for n in readers if n not in nodes and (s := _evaluate(n, known, x))), None)
        if found is None:
            break
        node, result = found
        nodes.append(node)
        known[node.outputs[0]] = result
        inner = [value for value in known if value is not None and value is not node.outputs[0]]
        if all(not value.is_graph_output() and all(n in nodes for n, _ in value.uses()) for value in inner):
            name = _ACTIVATIONS.get(_key(result))
            if name is not None:
                return name, tuple(nodes)
    return "none", ()


def _evaluate(node: ir.Node, known: Mapping[ir.Value | None, Sum], x: ir.Value) -> Sum | None:
    """Return what ``node`` computes, or None if that is no sum of known values, numbers and functions."""
    if node.domain != "" or node.op_type not in _OPERATORS or node.graph is not x.graph:
        return None
    inputs: list[Sum] = []
    for value in node.inputs:
        number = None if value in known else constant_number(value, rank=1)
        if value not in known and number is None:
            return None
        inputs.append(known[value] if number is None else {(): number})
    result = _OPERATORS[node.op_type](node, *inputs)
    return result if result is not None and len(result) <= _MOST_TERMS else None


# --- sums -------------------------------------------------------------------------------------------------------------


def _add(a: Sum, b: Sum) -> Sum:
    total = {term: a.get(term, 0.0) + b.get(term, 0.0) for term in (*a, *b)}
    return {term: number for term, number in total.items() if number}


def _multiply(a: Sum, b: Sum) -> Sum:
    total: Sum = {}
    for left, p in a.items():
        for right, q in b.items():
            total = _add(total, {tuple(sorted((*left, *right))): p * q})
    return total


def _power(a: Sum, b: Sum) -> Sum | None:
    exponent = b.get((), 0.0)
    if set(b) != {()} or exponent not in (1, 2, 3):
        return None
    result = a
    for _ in range(int(exponent) - 1):
        result = _multiply(result, a)
    return result


def _divide(a: Sum, b: Sum) -> Sum | None:
    divisor = b.get((), 0.0)
    return _multiply(a, {(): 1 / divisor}) if set(b) == {()} and divisor else None


def _key(a: Sum) -> tuple[Any, ...]:
    return tuple(sorted((term, float(f"{number:.{_DIGITS}g}")) for term, number in a.items()))


def _apply(name: str, a: Sum) -> Sum:
    return {((name, _key(a)),): 1.0}


# --- operators --------------------------------------------------------------------------------------------------------


def _gelu(x: Sum) -> Sum:
    return _multiply(_multiply(x, {(): 0.5}), _add({(): 1.0}, _apply("erf", _multiply(x, {(): 1 / math.sqrt(2)}))))


def _gelu_tanh(x: Sum) -> Sum:
    cubed = _multiply(_multiply(x, _multiply(x, x)), {(): 0.044715})
    inner = _multiply(_add(x, cubed), {(): math.sqrt(2 / math.pi)})
    return _multiply(_multiply(x, {(): 0.5}), _add({(): 1.0}, _apply("tanh", inner)))


_OPERATORS: Mapping[str, Callable[..., Sum | None]] = {
    "Add": lambda _, a, b: _add(a, b),
    "Sub": lambda _, a, b: _add(a, _multiply(b, {(): -1.0})),
    "Mul": lambda _, a, b: _multiply(a, b),
    "Div": lambda _, a, b: _divide(a, b),
    "Pow": lambda _, a, b: _power(a, b),
    "Erf": lambda _, a: _apply("erf", a),
    "Sigmoid": lambda _, a: _apply("sigmoid", a),
    "Tanh": lambda _, a: _apply("tanh", a),
    "Relu": lambda _, a: _apply("relu", a),
    "Clip": lambda _, a, *bounds: _apply("relu6", a) if bounds == ({(): 0.0}, {(): 6.0}) else None,
    "Gelu": lambda node, a: (_gelu_tanh if node.attributes.get_string("approximate") == "tanh" else _gelu)(a),
}

_IDENTITY: Sum = {(_X,): 1.0}
_ACTIVATIONS: Mapping[tuple[Any, ...], Activation] = {
    _key(_apply("relu", _IDENTITY)): "relu",
    _key(_apply("relu6", _IDENTITY)): "relu6",
    _key(_gelu(_IDENTITY)): "gelu",
    _key(_gelu_tanh(_IDENTITY)): "gelu_tanh",
    _key(_multiply(_IDENTITY, _apply("sigmoid", _IDENTITY))): "silu",
}

# --- in functions -----------------------------------------------------------------------------------------------------

_HALVED = (
    "one = Constant <value_float = 1.0> () half = Constant <value_float = 0.5> ()"
    " grown = Add (bent, one) twice = Mul (Z, grown) Y = Mul (twice, half)"
)
# Y, the activation of Z, in ONNX's text form. Gelu is in the forms that ONNX Runtime fuses: ONNX has it since opset 20.
FUNCTIONS: Mapping[Activation, str] = {
    "none": "",
    "relu": "Y = Relu (Z)",
    "relu6": "zero = Constant <value_float = 0.0> () six = Constant <value_float = 6.0> () Y = Clip (Z, zero, six)",
    "silu": "gate = Sigmoid (Z) Y = Mul (Z, gate)",
    "gelu": f"root = Constant <value_float = {math.sqrt(2)}> () over = Div (Z, root) bent = Erf (over) {_HALVED}",
    "gelu_tanh": (
        "three = Constant <value_float = 3.0> () share = Constant <value_float = 0.044715> ()"
        f" scale = Constant <value_float = {math.sqrt(2 / math.pi)}> () cubed = Pow (Z, three)"
        f" part = Mul (cubed, share) sum = Add (Z, part) scaled = Mul (sum, scale) bent = Tanh (scaled) {_HALVED}"
    ),
}
