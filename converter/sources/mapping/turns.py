"""Steps that reshape or transpose a leaf, without copying where numpy can avoid it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bf16kit.errors import UsageError
from converter.model import Array


@dataclass(frozen=True, slots=True)
class Turn:
    """One step: a ``reshape`` to ``numbers`` (−1 for what is left), or a ``transpose`` to that order of axes."""

    kind: Literal["reshape", "transpose"]
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{{{self.kind}: [{', '.join(map(str, self.numbers))}]}}"


def shape_after(shape: Sequence[int], turns: Sequence[Turn]) -> tuple[int, ...]:
    """Return the shape after applying ``turns`` to ``shape``; :class:`UsageError` for one that does not fit."""
    found = tuple(shape)
    for turn in turns:
        found = _reshaped(found, turn.numbers) if turn.kind == "reshape" else _transposed(found, turn.numbers)
    return found


def turned(array: Array, turns: Sequence[Turn]) -> Array:
    """Return ``array`` after ``turns``."""
    for turn in turns:
        array = array.reshape(turn.numbers) if turn.kind == "reshape" else array.transpose(turn.numbers)
    return array


def order(rank: int, turns: Sequence[Turn]) -> tuple[int, ...] | None:
    """Return the axis order that ``turns`` give an array of ``rank``; None if they also reshape it."""
    if any(turn.kind == "reshape" for turn in turns):
        return None
    found = tuple(range(rank))
    for turn in turns:
        found = tuple(found[axis] for axis in turn.numbers)
    return found


def parse(given: Any, where: str) -> tuple[Turn, ...]:
    """Parse the ``steps`` of a rule, a list of ``{reshape: […]}`` and ``{transpose: […]}``.

    Raises UsageError naming ``where``.
    """
    if given is None:
        return ()
    if not isinstance(given, list):
        raise UsageError(f"{where}: steps is {given!r}, expected a list such as [{{transpose: [1, 0]}}]")
    return tuple(_parse(step, where) for step in given)


def _parse(step: Any, where: str) -> Turn:
    if not isinstance(step, dict) or len(step) != 1 or next(iter(step)) not in ("reshape", "transpose"):
        raise UsageError(f"{where}: step {step!r} is neither {{reshape: […]}} nor {{transpose: […]}}")
    kind, numbers = next(iter(step.items()))
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers) or len(numbers) > 32:
        raise UsageError(f"{where}: {kind} is {numbers!r}, expected a list of integers")
    return Turn(kind, tuple(numbers))


def _reshaped(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    known = math.prod(size for size in wanted if size != -1)
    if wanted.count(-1) > 1 or any(size < -1 for size in wanted):
        raise UsageError(f"cannot reshape to {list(wanted)}: at most one size may be left open, as -1")
    if -1 in wanted:
        missing = math.prod(shape) // known if known else 0
        wanted = tuple(missing if size == -1 else size for size in wanted)
    if math.prod(wanted) != math.prod(shape):
        raise UsageError(f"cannot reshape {list(shape)} to {list(wanted)}")
    return wanted


def _transposed(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    if sorted(order) != list(range(len(shape))):
        raise UsageError(f"cannot transpose {list(shape)} to the order {list(order)} of axes")
    return tuple(shape[axis] for axis in order)
