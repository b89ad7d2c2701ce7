"""Reads the JSON of a torch.export program: type checks for each value, and the classes of arguments.

The numbers are those of torch's ``torch/_export/serde/schema.py``, schema version 8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bf16kit.messages.errors import RuntimeFailure

# ScalarType; complex numbers and 8-bit floats are left out: bf16kit has no such tensors.
DTYPES: Mapping[int, str] = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    12: "bool", 13: "bfloat16", 28: "uint16", 34: "uint32", 35: "uint64",
}  # fmt: skip
MEMORY_FORMATS: Mapping[int, str] = {
    1: "contiguous_format",
    2: "channels_last",
    3: "channels_last_3d",
    4: "preserve_format",
}
STRIDED = 7
SYMBOLIC_LARGEST = 2**47  # elements of one tensor: more than any machine can map
_LARGEST_INTEGER = 2**63
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,999}")
_OPTION = re.compile(r"[\w\-, .>()]{0,200}", re.ASCII)
_FLOATS = ("Infinity", "-Infinity", "NaN")


@dataclass(frozen=True, slots=True)
class Ref:
    """A value of the graph, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype as an argument, by numpy's name."""

    name: str


@dataclass(frozen=True, slots=True)
class MemoryFormat:
    """A memory format as an argument, by torch's name."""

    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """A device as an argument: always the one that the program runs on."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of plain tensors as an argument."""


def mapping(value: Any, what: str) -> dict[str, Any]:
    """``value`` as a JSON object; :class:`RuntimeFailure` for anything else."""
    if not isinstance(value, dict):
        raise RuntimeFailure(f"{what}: expected an object, got {_brief(value)}")
    return value


def listed(value: Any, what: str) -> list[Any]:
    """``value`` as a JSON array."""
    if not isinstance(value, list):
        raise RuntimeFailure(f"{what}: expected a list, got {_brief(value)}")
    return value


def text(value: Any, what: str) -> str:
    """``value`` as a string."""
    if not isinstance(value, str):
        raise RuntimeFailure(f"{what}: expected a string, got {_brief(value)}")
    return value


def integer(value: Any, what: str) -> int:
    """Return ``value`` as a 64-bit integer; :class:`RuntimeFailure` for true and false."""
    if type(value) is not int or not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER:
        raise RuntimeFailure(f"{what}: expected a 64-bit integer, got {_brief(value)}")
    return value


def boolean(value: Any, what: str) -> bool:
    """``value`` as true or false."""
    if not isinstance(value, bool):
        raise RuntimeFailure(f"{what}: expected true or false, got {_brief(value)}")
    return value


def number(value: Any, what: str) -> float:
    """Return ``value`` as a float; infinities and NaN, which JSON cannot express, are strings."""
    if value in _FLOATS:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RuntimeFailure(f"{what}: expected a number, got {_brief(value)}")
    try:
        return float(value)
    except OverflowError:
        raise RuntimeFailure(f"{what}: {_brief(value)} is beyond what a float holds") from None


def name(value: Any, what: str) -> str:
    """Return ``value`` as the name of a graph's value: letters, digits and underscores."""
    found = text(value, what)
    if not _NAME.fullmatch(found):
        raise RuntimeFailure(f"{what}: {_brief(found)} is not a name that torch gives to values")
    return found


def option(value: Any, what: str) -> str:
    """Return ``value`` as an option of an operator, such as ``tanh`` or an equation of einsum."""
    found = text(value, what)
    if not _OPTION.fullmatch(found):
        raise RuntimeFailure(f"{what}: {_brief(found)} is not an option that an operator takes")
    return found


def field(value: Mapping[str, Any], key: str) -> Any:
    """Return ``value[key]``; :class:`RuntimeFailure` if it is missing."""
    if key not in value:
        raise RuntimeFailure(f"a field {key!r} is missing")
    return value[key]


def union(value: Any, what: str) -> tuple[str, Any]:
    """Return the single key of a tagged value, and its content."""
    found = mapping(value, what)
    if len(found) != 1:
        raise RuntimeFailure(f"{what}: expected a value with one tag, got {len(found)}")
    return next(iter(found.items()))


def _brief(value: Any) -> str:
    found = repr(value)
    return found if len(found) < 80 else f"{found[:77]}..."
