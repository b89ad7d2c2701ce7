"""Steps that reshape or transpose a leaf, without copying where numpy can avoid it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bf16kit.messages.errors import UsageError
from converter.source import Array


@dataclass(frozen=True, slots=True)
class LayoutStep:
    """One step: a ``reshape`` to ``numbers`` (−1 for what is left), or a ``transpose`` to that order of axes."""

    kind: Literal["reshape", "transpose"]
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{{{self.kind}: [{', '.join(map(str, self.numbers))}]}}"


def shape_after(shape: Sequence[int], steps: Sequence[LayoutStep]) -> tuple[int, ...]:
    """Return the shape after applying ``steps`` to ``shape``; :class:`UsageError` for one that does not fit."""
    found = tuple(shape)
    for step in steps:
        found = _reshaped(found, step.numbers) if step.kind == "reshape" else _transposed(found, step.numbers)
    return found


def apply_steps(array: Array, steps: Sequence[LayoutStep]) -> Array:
    """Return ``array`` after ``steps``."""
    for step in steps:
        array = array.reshape(step.numbers) if step.kind == "reshape" else array.transpose(step.numbers)
    return array


def axis_order(rank: int, steps: Sequence[LayoutStep]) -> tuple[int, ...] | None:
    """Return the axis order that ``steps`` give an array of ``rank``; None if they also reshape it."""
    if any(step.kind == "reshape" for step in steps):
        return None
    found = tuple(range(rank))
    for step in steps:
        found = tuple(found[axis] for axis in step.numbers)
    return found


def parse(given: Any, where: str) -> tuple[LayoutStep, ...]:
    """Parse the ``steps`` of a rule, a list of ``{reshape: […]}`` and ``{transpose: […]}``.

    Raises UsageError naming ``where``.
    """
    if given is None:
        return ()
    if not isinstance(given, list):
        raise UsageError(f"{where}: steps is {given!r}, expected a list such as [{{transpose: [1, 0]}}]")
    return tuple(_parse(step, where) for step in given)


def _parse(step: Any, where: str) -> LayoutStep:
    if not isinstance(step, dict) or len(step) != 1 or next(iter(step)) not in ("reshape", "transpose"):
        raise UsageError(f"{where}: step {step!r} is neither {{reshape: […]}} nor {{transpose: […]}}")
    kind, numbers = next(iter(step.items()))
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers) or len(numbers) > 32:
        raise UsageError(f"{where}: {kind} is {numbers!r}, expected a list of integers")
    return LayoutStep(kind, tuple(numbers))


def _reshaped(shape: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    known = math.prod(size for size in target if size != -1)
    if target.count(-1) > 1 or any(size < -1 for size in target):
        raise UsageError(f"cannot reshape to {list(target)}: at most one size may be left open, as -1")
    if -1 in target:
        missing = math.prod(shape) // known if known else 0
        target = tuple(missing if size == -1 else size for size in target)
    if math.prod(target) != math.prod(shape):
        raise UsageError(f"cannot reshape {list(shape)} to {list(target)}")
    return target


def _transposed(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    if sorted(order) != list(range(len(shape))):
        raise UsageError(f"cannot transpose {list(shape)} to the order {list(order)} of axes")
    return tuple(shape[axis] for axis in order)
