"""Checks that a tensor of an ONNX file has as much data as its shape needs, in one field."""

from __future__ import annotations

import math
from pathlib import Path

from onnx import TensorProto, helper

from bf16kit.messages.errors import SourceError
from converter.read.onnx_soundness.walk import quoted

_LARGEST = 2**47  # bytes of one tensor: more than any machine can map

# How many elements share a byte, by dtype. Elements of 6 bits are packed in several ways, so they are not counted.
_PER_BYTE = {
    TensorProto.UINT4: 2,
    TensorProto.INT4: 2,
    TensorProto.FLOAT4E2M1: 2,
    **{number: 4 for name, number in TensorProto.DataType.items() if name in ("UINT2", "INT2")},
}
_UNCOUNTED = {number for name, number in TensorProto.DataType.items() if name.startswith("FLOAT6")}
# These take two entries of their field per element.
_COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)
_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")


def check_tensor(path: Path, tensor: TensorProto) -> None:
    """Raise :class:`SourceError` if the data of ``tensor`` does not match its dtype and shape."""
    known = tensor.data_type in helper.get_all_tensor_dtypes()
    if not known or tensor.data_type == TensorProto.UNDEFINED:
        raise SourceError(f"{path}: damaged: tensor {quoted(tensor.name)} has the unknown dtype {tensor.data_type}")
    count = math.prod(tensor.dims)
    if any(dim < 0 for dim in tensor.dims) or math.prod(max(dim, 1) for dim in tensor.dims) > _LARGEST:
        raise SourceError(f"{path}: damaged: tensor {quoted(tensor.name)} has the shape {shape_of(tensor)}")
    if tensor.HasField("segment"):
        raise SourceError(f"{path}: tensor {quoted(tensor.name)} is in segments, which are not supported")
    if tensor.data_location == TensorProto.EXTERNAL:
        _check_external(path, tensor, _nbytes(tensor, count))
    elif tensor.data_type in _UNCOUNTED:
        return
    elif tensor.HasField("raw_data") and tensor.data_type != TensorProto.STRING:
        _check_count(path, tensor, _nbytes(tensor, count), len(tensor.raw_data), "bytes")
        _check_unused(path, tensor, "raw_data")
    else:
        field = helper.tensor_dtype_to_field(tensor.data_type)
        what = "strings" if tensor.data_type == TensorProto.STRING else "numbers"
        _check_count(path, tensor, _entries(tensor, count), len(getattr(tensor, field)), what)
        _check_unused(path, tensor, field)


def shape_of(tensor: TensorProto) -> str:
    """Return the shape for a message, at most six dimensions of it."""
    shown = ", ".join(str(dim) for dim in tensor.dims[:6])
    return f"[{shown}{', …' if len(tensor.dims) > 6 else ''}]"


def _entries(tensor: TensorProto, count: int) -> int:
    """Return how many entries of its typed field ``count`` elements take."""
    if tensor.data_type in _COMPLEX:
        return 2 * count
    return -(-count // _PER_BYTE.get(tensor.data_type, 1))


def _nbytes(tensor: TensorProto, count: int) -> int:
    per_byte = _PER_BYTE.get(tensor.data_type)
    if per_byte is not None:
        return -(-count // per_byte)
    return int(count * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _check_count(path: Path, tensor: TensorProto, expected: int, found: int, what: str) -> None:
    if expected != found:
        raise SourceError(
            f"{path}: damaged: tensor {quoted(tensor.name)} of shape {shape_of(tensor)} needs {expected} {what}, and"
            f" the file has {found}"
        )


def _check_unused(path: Path, tensor: TensorProto, used: str) -> None:
    """Raise SourceError if a second field has data: readers differ in the field that they read."""
    for field in _FIELDS:
        if field != used and len(getattr(tensor, field)):
            dtype = TensorProto.DataType.Name(tensor.data_type)
            raise SourceError(f"{path}: damaged: tensor {quoted(tensor.name)} of {dtype} has data in {field} as well")


def _check_external(path: Path, tensor: TensorProto, nbytes: int) -> None:
    """Check the entries that locate the external data; the file itself is checked elsewhere."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if not entries.get("location") or "\0" in entries["location"]:
        raise SourceError(f"{path}: damaged: tensor {quoted(tensor.name)} is in another file, whose name is missing")
    if tensor.data_type == TensorProto.STRING:
        raise SourceError(f"{path}: damaged: tensor {quoted(tensor.name)} holds strings in another file")
    for key in ("offset", "length"):
        text = entries.get(key, "0")
        if not (text.isascii() and text.isdecimal() and len(text) < 20):
            raise SourceError(f"{path}: damaged: tensor {quoted(tensor.name)} has the {key} {quoted(text)}")
    length = int(entries.get("length", nbytes)) or nbytes
    if length != nbytes:
        raise SourceError(
            f"{path}: damaged: tensor {quoted(tensor.name)} of shape {shape_of(tensor)} needs {nbytes} bytes, and its"
            f" entry says {length}"
        )
