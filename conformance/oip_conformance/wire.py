"""Tensors on the wire: the protocol's datatypes, as raw bytes and typed contents. Uses only numpy and protobuf.

FP16 is held as ``numpy.float16``, BF16 as the bits of its values in ``numpy.uint16``, BYTES as objects of bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from oip_conformance.protocol import inference_pb2 as pb

Array: TypeAlias = NDArray[Any]


class Malformed(Exception):
    """Bytes that are not a tensor of the stated datatype and shape."""


@dataclass(frozen=True, slots=True)
class Datatype:
    """A datatype of the protocol; ``field`` of ``InferTensorContents`` carries it, or None if it is always raw."""

    name: str
    numpy: np.dtype[Any]
    field: str | None

    @property
    def framed(self) -> bool:
        """Whether each element is preceded by its length."""
        return self.name == "BYTES"


DATATYPES = {
    name: Datatype(name, np.dtype(kind), field)
    for name, kind, field in (
        ("BOOL", np.bool_, "bool_contents"),
        ("UINT8", np.uint8, "uint_contents"),
        ("UINT16", np.uint16, "uint_contents"),
        ("UINT32", np.uint32, "uint_contents"),
        ("UINT64", np.uint64, "uint64_contents"),
        ("INT8", np.int8, "int_contents"),
        ("INT16", np.int16, "int_contents"),
        ("INT32", np.int32, "int_contents"),
        ("INT64", np.int64, "int64_contents"),
        ("FP16", np.float16, None),
        ("BF16", np.uint16, None),
        ("FP32", np.float32, "fp32_contents"),
        ("FP64", np.float64, "fp64_contents"),
        ("BYTES", np.object_, "bytes_contents"),
    )
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value with its datatype's name on the wire."""

    datatype: str
    array: Array


def filled(datatype: str, shape: Sequence[int], values: Sequence[float] | None = None) -> Tensor:
    """Return a tensor whose elements repeat ``values``.

    The default is ones (true, ``b"a"``), and for floats a ramp up to 1.
    """
    kind, count = DATATYPES[datatype], int(np.prod(shape, dtype=np.int64))
    if kind.framed:
        made: Array = np.array([str(int(v)).encode() for v in values] if values else [b"a"], np.object_)
    elif values:
        made = np.array(values, np.float64)
    elif datatype in ("FP16", "BF16", "FP32", "FP64"):
        made = np.arange(1, 9) / 8.0
    else:
        made = np.ones(1)
    flat = np.resize(made, count) if count else made[:0]
    if datatype == "BF16":
        bits: Array = (flat.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return Tensor(datatype, bits.reshape(shape))
    return Tensor(datatype, flat.astype(kind.numpy).reshape(shape))


def encode(tensor: Tensor) -> bytes:
    """Return the bytes for ``raw_input_contents``: little-endian, row-major.

    Each element of BYTES is preceded by its length.
    """
    if DATATYPES[tensor.datatype].framed:
        return b"".join(struct.pack("<I", len(element)) + element for element in tensor.array.ravel())
    return np.ascontiguousarray(tensor.array).tobytes()


def decode(datatype: str, shape: Sequence[int], raw: bytes) -> Array:
    """Parse the tensor in ``raw``. Raises :class:`Malformed` if the bytes do not fill it exactly."""
    kind = DATATYPES.get(datatype)
    if kind is None:
        raise Malformed(f"datatype {datatype!r} is none of the protocol's")
    count = int(np.prod(shape, dtype=np.int64))
    if kind.framed:
        return np.array([*_frames(raw, count), None], np.object_)[:-1].reshape(shape)
    if len(raw) != count * kind.numpy.itemsize:
        raise Malformed(f"{len(raw)} bytes for {datatype} of shape {list(shape)}: {count * kind.numpy.itemsize} wanted")
    return np.frombuffer(raw, kind.numpy).reshape(shape)


def fill_contents(tensor: Tensor, contents: pb.InferTensorContents) -> None:
    """Add the values of ``tensor`` to the field of ``contents`` for their datatype."""
    field = DATATYPES[tensor.datatype].field
    if field is None:
        raise Malformed(f"{tensor.datatype} has no typed contents")
    getattr(contents, field).extend(tensor.array.ravel().tolist())


def read_contents(datatype: str, shape: Sequence[int], contents: pb.InferTensorContents) -> Array:
    """Parse the tensor in typed ``contents``. Raises :class:`Malformed`."""
    kind = DATATYPES.get(datatype)
    if kind is None or kind.field is None:
        raise Malformed(f"{datatype or 'no datatype'!r} has no typed contents")
    others = [field.name for field, _ in contents.ListFields() if field.name != kind.field]
    values = getattr(contents, kind.field)
    count = int(np.prod(shape, dtype=np.int64))
    if others or len(values) != count:
        raise Malformed(f"{len(values)} values in {kind.field} for shape {list(shape)}; also filled: {others}")
    if kind.framed:
        return np.array([*values, None], np.object_)[:-1].reshape(shape)
    return np.array(values, kind.numpy).reshape(shape)


def _frames(raw: bytes, count: int) -> list[bytes]:
    elements: list[bytes] = []
    at = 0
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at) if at + 4 <= len(raw) else (len(raw),)
        if at + 4 + size > len(raw):
            raise Malformed(f"BYTES element {len(elements)} is longer than what is left of {len(raw)} bytes")
        elements.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    if len(elements) != count:
        raise Malformed(f"{len(elements)} BYTES elements for a shape of {count}")
    return elements


def same(one: Array, other: Array) -> bool:
    """Return whether two tensors are equal, except for the last bits of floats."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.kind == "f":
        rough = 1e-2 if one.dtype.itemsize == 2 else 1e-3
        return bool(np.allclose(one, other, rtol=rough, atol=rough, equal_nan=True))
    return bool(np.array_equal(one, other))
