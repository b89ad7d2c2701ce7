"""Decodes and encodes one tensor: raw bytes, typed contents, and bf16 or fp16 values for fp32 tensors.

Sizes are checked before anything is allocated. Invalid tensors raise :class:`InvalidRequest` naming the
tensor, what came and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from bf16kit.messages.errors import InvalidRequest
from bf16kit.messages.wording import quoted
from bf16kit.numerics import rounding as numerics
from bf16kit.numerics.tensors import BY_OIP, DType, TensorSpec
from bf16kit.numerics.tensors import Array as Array
from bf16kit.protocol import inference_pb2 as pb

_MAX_STRINGS = 1 << 16  # of a BYTES tensor: a string of two bytes has six on the wire, and some 140 in memory
_LENGTH = 4  # bytes of the little-endian length before each element of a BYTES tensor
_PIECE = 1 << 16  # numbers of typed contents that are converted at a time

#: The field of ``InferTensorContents`` for each datatype. FP16 and BF16 have none: they are sent raw.
CONTENTS_FIELD = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def wire_dtype(spec: TensorSpec, model_dtype: DType, datatype: str) -> DType:
    """Return the datatype of a tensor for ``spec``: the model's, or FP16 or BF16 for FP32. Raises InvalidRequest."""
    if datatype == model_dtype.oip:
        return model_dtype
    if model_dtype.oip == "FP32" and datatype in ("BF16", "FP16"):
        return BY_OIP[datatype]
    also = " (BF16 and FP16 are widened exactly)" if model_dtype.oip == "FP32" else ""
    raise InvalidRequest(f"input {spec.name!r} has datatype {quoted(datatype)}, expected {model_dtype.oip}{also}")


def element_count(name: str, shape: Sequence[int]) -> int:
    """Return the number of elements of ``shape``, exact for any sizes. Empty dimensions are allowed."""
    if shape and min(shape) < 0:
        raise InvalidRequest(f"input {name!r} has shape {list(shape)}: a request's dimensions are 0 or more")
    return math.prod(shape)


def decode_raw(name: str, dtype: DType, shape: tuple[int, ...], data: bytes) -> Array:
    """Return the tensor in ``data``: a read-only view, or for BYTES an object array of ``str``."""
    count, nbytes = element_count(name, shape), len(data)
    if dtype.oip == "BYTES":
        if count * _LENGTH > nbytes:
            raise InvalidRequest(
                f"input {name!r} has {nbytes} bytes, too few for {count} BYTES elements of at least {_LENGTH} each"
            )
        return _objects(name, _split_bytes(name, count, data), shape)
    if nbytes != count * dtype.numpy.itemsize:
        raise InvalidRequest(
            f"input {name!r} has {nbytes} bytes, expected {count * dtype.numpy.itemsize} for {dtype.oip} of shape"
            f" {list(shape)}"
        )
    array = np.frombuffer(data, dtype.numpy).reshape(shape)
    if dtype.oip == "BOOL" and count and array.view(np.uint8).max() > 1:
        raise InvalidRequest(f"input {name!r} is BOOL and holds a byte that is neither 0 nor 1")
    return array


def decode_contents(name: str, dtype: DType, shape: tuple[int, ...], contents: pb.InferTensorContents) -> Array:
    """Return the tensor in the typed ``contents``, of which only the field of its datatype may be filled."""
    field = CONTENTS_FIELD.get(dtype.oip)
    if field is None:
        raise InvalidRequest(f"input {name!r} is {dtype.oip}, which is accepted in raw_input_contents only")
    others = [f.name for f, _ in contents.ListFields() if f.name != field]
    if others:
        raise InvalidRequest(f"input {name!r} is {dtype.oip}, expected in {field}, but {others[0]} is filled")
    values = getattr(contents, field)
    count = element_count(name, shape)
    if len(values) != count:
        raise InvalidRequest(
            f"input {name!r} has {len(values)} elements in {field}, expected {count} for shape {list(shape)}"
        )
    if dtype.oip == "BYTES":
        return _objects(name, values, shape)
    try:
        return _converted(values, dtype, count).reshape(shape)
    except OverflowError:
        raise InvalidRequest(f"input {name!r} holds a value outside the range of {dtype.oip}") from None


def widen(array: Array) -> Array:
    """Convert bf16 or fp16 to fp32, exactly."""
    if array.dtype == numerics.BF16:
        return numerics.to_fp32(array)
    return array.astype(np.float32)


def packed(dtype: DType, array: Array) -> Array:
    """Return the bytes of :func:`encode_raw` as an array; ``array`` itself if it needs no conversion."""
    if dtype.oip != "BYTES":
        return _narrowed(dtype, array)
    encoded = (e.encode() if isinstance(e, str) else bytes(e) for e in array.ravel())
    return np.frombuffer(b"".join(len(e).to_bytes(_LENGTH, "little") + e for e in encoded), np.uint8)


def encode_raw(dtype: DType, array: Array) -> bytes:
    """Return the bytes of ``array`` for ``raw_output_contents``: row-major, or length-prefixed for BYTES."""
    return packed(dtype, array).tobytes()


def top_classes(name: str, array: Array, count: int, *, batched: bool, labels: Sequence[str] = ()) -> Array:
    """Return the ``count`` largest values of each row, the largest first, as Triton writes them.

    A value is ``0.913240:7``, or ``0.913240:7:tabby`` if index 7 has a label. ``batched``: each index of the first axis
    is a row; otherwise the whole array is one row, and the result has one dimension less. Equal values are in order of
    index; NaN comes last. Raises InvalidRequest for too many classes.
    """
    if array.dtype == numerics.BF16:
        array = numerics.to_fp32(array)
    rows = array.reshape(len(array), math.prod(array.shape[1:])) if batched else array.reshape(1, array.size)
    count = min(count, rows.shape[1])
    if len(rows) * count > _MAX_STRINGS:
        raise InvalidRequest(f"output {name!r} would have {len(rows) * count} classes, expected at most {_MAX_STRINGS}")
    is_integer = rows.dtype.kind in "iu"
    number_format = "%d" if is_integer else "%f"
    classes = np.empty((len(rows), count), np.object_)
    for row, values in enumerate(rows):  # row by row: the sort order takes twice the memory of the values
        sort_keys = ~values if is_integer else -values  # ~ reverses the order of integers, and never overflows
        for column, index in enumerate(np.argsort(sort_keys, kind="stable")[:count]):
            label = f":{labels[index]}" if index < len(labels) else ""
            classes[row, column] = f"{number_format % values[index]}:{index}{label}"
    return classes if batched else classes[0]


def _narrowed(dtype: DType, array: Array) -> Array:
    """Round an fp32 array to ``dtype`` BF16 or FP16, to nearest, ties to even; return other arrays as they are.

    Values that are too large become infinite, with their sign: from 65,520 on in FP16, from 3.396e38 on in BF16.
    """
    if dtype.oip not in ("BF16", "FP16") or array.dtype != np.float32:
        return array
    if dtype.oip == "BF16":
        return numerics.to_bf16(array)
    with np.errstate(over="ignore"):
        return array.astype(np.float16)


def _converted(values: Iterable[Any], dtype: DType, count: int) -> Array:
    """Return the numbers of a repeated field. Converted piece by piece: numpy holds Python's lock during each."""
    if count <= _PIECE:
        return np.fromiter(values, dtype.numpy, count)
    left, array = iter(values), np.empty(count, dtype.numpy)
    for at in range(0, count, _PIECE):
        piece = array[at : at + _PIECE]
        piece[:] = np.fromiter(islice(left, len(piece)), dtype.numpy, len(piece))
    return array


def _split_bytes(name: str, count: int, data: bytes) -> list[bytes]:
    """Return the ``count`` length-prefixed elements in ``data``, whose size has been checked against ``count``."""
    if count > _MAX_STRINGS:
        raise InvalidRequest(f"input {name!r} has {count} BYTES elements, expected at most {_MAX_STRINGS}")
    elements = []
    at = 0
    for index in range(count):
        start = at + _LENGTH
        end = start + int.from_bytes(data[at:start], "little")
        if end > len(data):
            raise InvalidRequest(f"input {name!r} ends inside BYTES element {index} of {count}")
        elements.append(data[start:end])
        at = end
    if at != len(data):
        raise InvalidRequest(f"input {name!r} has {len(data)} bytes, expected {at} for its {count} BYTES elements")
    return elements


def _objects(name: str, elements: Sequence[bytes], shape: tuple[int, ...]) -> Array:
    """Return an object array of ``str``: strings in a model are UTF-8, and a runtime would print bytes as ``b'…'``."""
    array = np.empty(len(elements), np.object_)
    try:
        array[:] = [element.decode() for element in elements]
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input {name!r} holds BYTES that are not UTF-8: {error.reason}") from None
    return array.reshape(shape)
