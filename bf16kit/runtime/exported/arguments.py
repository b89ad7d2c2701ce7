"""The arguments of a torch.export program's operators, read from its JSON by whitelist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.exported.values import (
    DTYPES,
    MEMORY_FORMATS,
    STRIDED,
    Device,
    DType,
    Layout,
    MemoryFormat,
    Ref,
    boolean,
    field,
    integer,
    listed,
    mapping,
    name,
    number,
    option,
    union,
)

_MOST = 1_000_000  # values in a list


def read_argument(value: Any, what: str, graph: Callable[[Any], Any]) -> Any:
    """Read an argument: a plain value, a :class:`Ref`, an option, or a list of them.

    Options are classes of :mod:`bf16kit.runtime.exported.values`. ``graph`` reads an argument that is itself a graph.

    Raises :class:`RuntimeFailure`, which begins with ``what``, for kinds that bf16kit does not know.
    """
    tag, found = union(value, what)
    if tag in _PLAIN:
        return _PLAIN[tag](found, what)
    if tag.startswith("as_sym_") and not tag.endswith("s"):
        return _symbolic(found, what)
    if tag in _LISTS:
        items = listed(found, what)
        if len(items) > _MOST:
            raise RuntimeFailure(f"{what} has a list of {len(items)} values, over the limit of {_MOST}")
        return [_LISTS[tag](item, what) for item in items]
    if tag == "as_graph":
        return graph(field(mapping(found, what), "graph"))
    raise RuntimeFailure(f"{what} is given a value of kind {tag[:80]!r}, which bf16kit does not know")


def _tensor(value: Any, what: str) -> Ref:
    return Ref(name(field(mapping(value, what), "name"), what))


def _optional(value: Any, what: str) -> Ref | None:
    tag, found = union(value, what)
    if tag == "as_none":
        return None
    if tag != "as_tensor":
        raise RuntimeFailure(f"{what} is given a value of kind {tag[:80]!r} where a tensor is expected")
    return _tensor(found, what)


def _symbolic(value: Any, what: str) -> Any:
    """Read a size: a :class:`Ref` if it is computed, else the number."""
    tag, found = union(value, what)
    if tag == "as_name":
        return Ref(name(found, what))
    plain = {"as_int": integer, "as_float": number, "as_bool": boolean}
    if tag not in plain:
        raise RuntimeFailure(f"{what} is given a size of kind {tag[:80]!r}, which bf16kit does not know")
    return plain[tag](found, what)


def _dtype(value: Any, what: str) -> DType:
    code = integer(value, what)
    if code not in DTYPES:
        raise RuntimeFailure(f"{what} is given torch's scalar type {code}, which bf16kit does not support")
    return DType(DTYPES[code])


def _memory_format(value: Any, what: str) -> MemoryFormat:
    code = integer(value, what)
    if code not in MEMORY_FORMATS:
        raise RuntimeFailure(f"{what} is given torch's memory format {code}, which bf16kit does not know")
    return MemoryFormat(MEMORY_FORMATS[code])


def _layout(value: Any, what: str) -> Layout:
    if integer(value, what) != STRIDED:
        raise RuntimeFailure(f"{what} is given a layout other than that of plain tensors")
    return Layout()


def _nothing(_value: Any, _what: str) -> None: ...


def _device(_value: Any, _what: str) -> Device:
    return Device()


_PLAIN = {
    "as_none": _nothing,
    "as_tensor": _tensor,
    "as_optional_tensor": _optional,
    "as_int": integer,
    "as_float": number,
    "as_bool": boolean,
    "as_string": option,
    "as_scalar_type": _dtype,
    "as_memory_format": _memory_format,
    "as_layout": _layout,
    "as_device": _device,
}
_LISTS = {
    "as_tensors": _tensor,
    "as_optional_tensors": _optional,
    "as_ints": integer,
    "as_floats": number,
    "as_bools": boolean,
    "as_sym_ints": _symbolic,
    "as_sym_floats": _symbolic,
    "as_sym_bools": _symbolic,
}
