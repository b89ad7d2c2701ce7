"""Named dimensions as exporters write them: a name, or a small expression, ``Min(512, seq)`` or ``2*seq + 1``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Mult: operator.mul,
    ast.Sub: operator.sub,
}
_FUNCTIONS: Mapping[str, Callable[..., int]] = {"Max": max, "Min": min, "max": max, "min": min}


def size(expression: str, dims: Mapping[str, int]) -> int | None:
    """Its value where the names are ``dims``; None for what is no such expression, or names others."""
    if expression in dims:
        return dims[expression]
    try:
        return _value(ast.parse(expression, mode="eval").body, dims)
    except (SyntaxError, KeyError, TypeError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: Any, dims: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.Name(id=name):
            return dims[name]
        case ast.BinOp(left=left, op=operation, right=right):
            return _OPERATORS[type(operation)](_value(left, dims), _value(right, dims))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return _FUNCTIONS[name](*(_value(each, dims) for each in arguments))
    raise ValueError(f"{ast.dump(node)[:40]} is no size")
