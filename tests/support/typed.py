"""Check that values have the types that their classes declare, for classes that do not validate their arguments."""

from collections.abc import Iterator
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def mistyped(value: Any, kind: Any, where: str = "") -> Iterator[str]:
    """Yield a message for each place where ``value``, or a value inside it, does not have its declared type."""
    if not _is(value, kind):
        yield f"{where}: {value!r} is no {kind}"
        return
    inner = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        kind = next((each for each in inner if not list(mistyped(value, each))), None)
        if kind is None:
            yield f"{where}: {value!r} is none of {inner}"
    elif isinstance(value, list) and inner:
        for at, each in enumerate(value):
            yield from mistyped(each, inner[0], f"{where}[{at}]")
    elif isinstance(value, dict) and inner:
        for key, each in value.items():
            yield from mistyped(each, inner[1], f"{where}.{key}")
    elif hasattr(value, "to_json"):
        for name, declared in get_type_hints(type(value)).items():
            yield from mistyped(getattr(value, name), declared, f"{where}.{name}")


def _is(value: Any, kind: Any) -> bool:
    """Return whether the value itself, without the values inside it, has the type."""
    origin = get_origin(kind)
    if origin is Literal:
        return value in get_args(kind)
    outside = origin if isinstance(origin, type) else kind
    if not isinstance(outside, type) or outside is UnionType:
        return True
    if issubclass(outside, Enum):
        return value in [each.value for each in outside]
    return isinstance(value, (int, float) if outside is float else outside)
