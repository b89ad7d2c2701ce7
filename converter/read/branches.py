"""Finds the sizes for which an exported graph holds: tracing takes one branch of a module, that of its example."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from bf16kit.converter.graph.dimensions import SizeCondition
from bf16kit.numerics.tensors import TensorSpec

_TRIED = 256  # combinations of sizes
_LARGEST = 2.0**24  # of them
_SMALLEST = 2  # torch takes no free size for 1, and its graphs hold for it nevertheless


def size_conditions(program: torch.export.ExportedProgram, inputs: Sequence[TensorSpec]) -> list[SizeCondition]:
    """Return what tracing has taken for granted of the free dimensions of ``inputs``.

    torch records more: what holds for all sizes, or follows from other conditions. So sizes are tried: each condition
    that is returned fails for some for which those before it hold.
    """
    from torch.utils._sympy.printers import PythonPrinter

    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    free: dict[str, str] = {}  # dimensions, by torch's symbols
    ranges: Mapping[Any, Any] = program.range_constraints
    recorded = [symbol >= each.lower for symbol, each in ranges.items()]
    recorded += [symbol <= each.upper for symbol, each in ranges.items() if each.upper.is_Integer]  # not infinity
    for name, spec in zip(program.graph_signature.user_inputs, inputs, strict=True):
        for size, dim in zip(values[str(name)].shape, spec.shape, strict=True):
            if isinstance(size, torch.SymInt) and isinstance(dim, str):
                asserted = size.node.shape_env.deferred_runtime_asserts.values() if not free else ()
                recorded += [_plain(each.expr) for one in asserted for each in one]
                free[str(size.node.expr)] = dim
    dims = [*dict.fromkeys(free.values())]
    exponents = np.random.default_rng(0).uniform(math.log2(_SMALLEST), math.log2(_LARGEST), (_TRIED, len(dims)))
    tried = [dict(zip(dims, map(int, row), strict=True)) for row in np.exp2(exponents)]
    found: list[SizeCondition] = []
    for expression in recorded:
        if free.keys() >= {str(symbol) for symbol in expression.free_symbols}:
            text = PythonPrinter().doprint(expression)
            holds = partial(_holds, compile(text, "<condition>", "eval"), free)
            kept = [sizes for sizes in tried if holds(sizes)]
            if len(kept) < len(tried):
                found.append(SizeCondition(re.sub(r"\bs\d+\b", lambda symbol: free[symbol[0]], text), holds))
            tried = kept
    return found


def _plain(condition: Any) -> Any:
    """Return ``a == min(a, b)``, which torch records of a part of a table, as ``a <= b``, and the same of ``max``."""
    sides = condition.args if condition.func.__name__ == "Equality" else ()
    for one, other in (sides, sides[::-1]) if sides else ():
        name, bounds = other.func.__name__, [each for each in other.args if each != one]
        if name in ("Max", "Min") and len(bounds) == 1 and one in other.args:
            return one <= bounds[0] if name == "Min" else one >= bounds[0]
    return condition


def _holds(condition: Any, free: Mapping[str, str], sizes: Mapping[str, int]) -> bool:
    values = {symbol: sizes[dim] for symbol, dim in free.items()}
    try:
        return bool(eval(condition, {"math": math, **values}))  # noqa: S307 - torch printed it
    except ArithmeticError:  # a remainder by a remainder of zero
        return False
    except (AttributeError, NameError, TypeError):  # a function of torch's own, which is not evaluated
        return True
