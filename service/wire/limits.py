"""Limits on the memory and time that one request takes, beside the size of its message.

A message may swell: 62 KiB decompress to 63 MiB of zeros, and an empty input is two bytes on the wire and some ninety
in memory. 64 MiB of the latter took 2.7 GiB, and blocked the process for two seconds, because protobuf holds Python's
lock while it parses. So a message is decompressed here (gRPC would do it on the one thread that all calls share), and a
large one is skimmed before it is parsed. A request may also swell in the model: by its dimensions, its empty tensors,
and its response.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from bf16kit.messages.errors import InvalidRequest
from bf16kit.numerics.tensors import DType, TensorSpec
from bf16kit.service.contract import Bounds, Model

_GZIP = b"\x1f\x8b"  # never the start of a message: 0x1f would have a wire type that does not exist
_ZLIB = 0x78  # with a valid second byte; in protobuf it would be field 15, which no request has
_AUTO = zlib.MAX_WBITS | 32  # zlib detects which of the two formats it is
_SMALL_INFLATED = 64 << 10  # decompressed bytes; smaller messages need not wait for each other
_SMALL = 16 << 10  # bytes; a smaller message is not skimmed: parsed, it takes 1 MiB at most
_MAX_FIELDS = 1 << 16  # the most fields of a larger message, nested ones included
_MAX_INTEGERS = 8 << 20  # the most integers in shapes and contents; each has one byte or more on the wire
_INTEGER_BYTES = 16  # bytes in memory: eight in the message, and eight in the array made from it
_FIELD_BYTES = 100  # bytes in memory of an empty field
_MAX_TEXT = 1 << 20  # the most bytes of a name, an id or other text: Python copies and hashes texts again and again
_LONGEST_VARINT = 10  # bytes
_MAX_EMPTY_ELEMENTS = 1 << 20  # of an empty tensor whose empty dimensions are counted as 1
_MIN_ITEM_BYTES = 4  # of one element of a BYTES tensor: the length of an empty string

#: By field number: the fields of a nested message, 'text' for strings, 'packed' for integers that may be packed.
_Known: TypeAlias = "Mapping[int, _Known | Literal['text', 'packed']]"
_FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)  # of the same size on the wire as in memory
# Called with the bytes that a request takes so far in memory; may raise.
Reserve: TypeAlias = Callable[[int], None]


class MessageReader:
    """Reads messages of one kind, of at most ``max_bytes`` when they are decompressed.

    Large messages are decompressed and parsed one at a time: two at once would take as long, and twice the memory, and
    all other threads would wait for both.
    """

    def __init__(self, kind: Descriptor, max_bytes: int) -> None:
        self._kind = kind
        self._max_bytes = max_bytes
        self._parse = GetMessageClass(kind).FromString
        self._known = _known(kind)
        self._one_at_a_time = threading.Lock()

    def __call__(self, data: bytes, reserve: Reserve) -> Message:
        """Return the message in ``data``, which may be compressed.

        Raises InvalidRequest if ``data`` is no such message, is too large, or would take much more memory than its
        size; and what ``reserve`` raises.
        """
        if _is_compressed(data):
            data = self._inflated(data, reserve)
        reserve(len(data))
        try:
            return self._parse(data) if len(data) <= _SMALL else self._parsed(data, reserve)
        except DecodeError:
            raise InvalidRequest("the request is not a message of this RPC: its bytes cannot be parsed") from None

    @staticmethod
    def is_quick(data: bytes) -> bool:
        """Return whether ``data`` is parsed and decoded in less than about a millisecond."""
        return len(data) <= _SMALL and not _is_compressed(data)

    def _parsed(self, data: bytes, reserve: Reserve) -> Message:
        if len(data) > self._max_bytes:
            raise InvalidRequest(
                f"the request has {len(data)} bytes, expected at most {self._max_bytes} for a {self._kind.name}"
            )
        with self._one_at_a_time:
            scanner = _Scanner(data)
            scanner.count(0, len(data), self._known)
            reserve(len(data) + scanner.extra_memory)
            return self._parse(data)

    def _inflated(self, data: bytes, reserve: Reserve) -> bytes:
        most = self._max_bytes
        inflate = zlib.decompressobj(_AUTO)
        inflated = _inflate_up_to(inflate, data, min(_SMALL_INFLATED, most + 1))
        if not inflate.eof and len(inflated) <= most:
            with self._one_at_a_time:
                reserve(len(data))  # others may have taken long, and the client may have left
                inflated += _inflate_up_to(inflate, inflate.unconsumed_tail, most + 1 - len(inflated))
        if len(inflated) > most:
            raise InvalidRequest(f"the request has more than {most} bytes once it is decompressed")
        if not inflate.eof or inflate.unused_data:
            raise InvalidRequest("the request cannot be decompressed: it is truncated, or has extra bytes at its end")
        return inflated


def _inflate_up_to(inflate: Any, data: bytes, most: int) -> bytes:
    """Decompress up to ``most`` bytes. ``most`` is at least 1: for zlib, 0 means no limit."""
    try:
        more: bytes = inflate.decompress(data, most)
    except zlib.error:
        raise InvalidRequest("the request cannot be decompressed") from None
    return more


def _is_compressed(data: bytes) -> bool:
    return data[:2] == _GZIP or (data[:1] == b"\x78" and len(data) > 1 and (_ZLIB << 8 | data[1]) % 31 == 0)


class _Scanner:
    """One pass over the bytes of a message. It ends at the first error, which protobuf will report."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._fields = 0
        self._integers = 0

    @property
    def extra_memory(self) -> int:
        """The memory in bytes that the skimmed fields take beyond their size on the wire."""
        return self._fields * _FIELD_BYTES + self._integers * _INTEGER_BYTES

    def count(self, at: int, end: int, known: _Known) -> None:
        """Count the fields and integers between ``at`` and ``end``. Raises InvalidRequest if there are too many."""
        with suppress(IndexError):
            while at < end:
                self._fields += 1
                if self._fields > _MAX_FIELDS:
                    raise InvalidRequest(
                        f"the request has more than {_MAX_FIELDS} fields; send numbers in raw_input_contents, one field"
                        " for each tensor, and fewer strings"
                    )
                tag, at = self._varint(at)
                kind = tag & 7
                if kind == 2:
                    size, at = self._varint(at)
                    if tag >> 3 in known:
                        self._count_value(at, min(at + size, end), known[tag >> 3])
                    at += size
                elif kind == 0:
                    _, at = self._varint(at)
                else:  # a group's start and end have no value; its fields follow as others do
                    at += {1: 8, 3: 0, 4: 0, 5: 4}.get(kind, end)

    def _count_value(self, at: int, end: int, known: _Known | Literal["text", "packed"]) -> None:
        if known == "text":
            if end - at > _MAX_TEXT:
                raise InvalidRequest(f"the request has a string of {end - at} bytes, expected at most {_MAX_TEXT}")
        elif known == "packed":
            # The last byte of each integer is below 0x80, and no other is.
            self._integers += int(np.count_nonzero(np.frombuffer(self._data, np.uint8)[at:end] < 0x80))
            if self._integers > _MAX_INTEGERS:
                raise InvalidRequest(
                    f"the request has more than {_MAX_INTEGERS} integers in shapes and contents; send tensors in"
                    " raw_input_contents"
                )
        else:
            self.count(at, end, known)

    def _varint(self, at: int) -> tuple[int, int]:
        """Return the integer at ``at``, and where it ends. Raises IndexError if it does not end."""
        number = self._data[at]
        if number < 0x80:  # most have one byte
            return number, at + 1
        number &= 0x7F
        for place in range(1, _LONGEST_VARINT):
            byte = self._data[at + place]
            number |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return number, at + place + 1
        raise IndexError


def _known(kind: Descriptor) -> _Known:
    known: dict[int, Any] = {}
    for field in kind.fields:
        if field.message_type is not None:
            known[field.number] = _known(field.message_type)
        elif field.is_repeated and field.is_packed and field.cpp_type not in _FLOATS:
            known[field.number] = "packed"
        elif field.type == FieldDescriptor.TYPE_STRING:
            known[field.number] = "text"
    return known


class BoundsCheck:
    """The limits of one model, and the parts of its shapes that the checks need."""

    def __init__(self, model: Model) -> None:
        self._bounds: Bounds = model.bounds
        known = {dim for spec in model.inputs for dim in spec.shape if isinstance(dim, str)}
        self._dims = {name: bound for name, bound in self._bounds.dims.items() if name in known}
        self._empty = {spec.name: max(_fixed(spec), _MAX_EMPTY_ELEMENTS) for spec in model.inputs}
        self._outputs = {s.name: (_fixed(s), _free(s)) for s in model.outputs if known.issuperset(_free(s))}

    def check_empty(self, name: str, shape: Sequence[int]) -> None:
        """Raise InvalidRequest if the other dimensions of an empty input are too large, for this server or its model.

        They cost the client nothing, but a model may make a large tensor of an empty one: the sum of [2^26,0] along its
        last axis has 256 MiB.
        """
        if math.prod(size or 1 for size in shape) > self._empty[name]:
            raise InvalidRequest(f"input {name!r} has shape {list(shape)}: too large, although it is empty")

    def check_request(self, sizes: Mapping[str, int], wanted: Mapping[str, DType]) -> None:
        """Raise InvalidRequest if a dimension is too large, or if the response is known to become too large.

        ``sizes`` has the sizes of the free dimensions, by name; ``wanted`` the datatypes of the requested outputs.
        """
        for name, bound in self._dims.items():
            if sizes[name] > bound:
                raise InvalidRequest(
                    f"dimension {name!r} is {sizes[name]}, expected at most {bound}"
                    " (max_dims of the model's serving.yaml)"
                )
        response_bytes = 0
        for name, dtype in wanted.items():
            if name in self._outputs:
                fixed, free = self._outputs[name]
                response_bytes += math.prod([sizes[dim] for dim in free], start=fixed) * item_size(dtype)
        self.check_response(response_bytes)

    def check_response(self, nbytes: int) -> None:
        """Raise InvalidRequest if ``nbytes`` bytes of outputs are too many for one response."""
        bound = self._bounds.response_bytes
        if nbytes > bound:
            raise InvalidRequest(
                f"the response has {nbytes} bytes or more, expected at most {bound}; ask for fewer rows, shorter inputs"
                " or fewer outputs"
            )


def item_size(dtype: DType) -> int:
    """Return the bytes of one element on the wire; for BYTES, the least."""
    return _MIN_ITEM_BYTES if dtype.oip == "BYTES" else dtype.numpy.itemsize


def _free(spec: TensorSpec) -> Sequence[str]:
    return [dim for dim in spec.shape if isinstance(dim, str)]


def _fixed(spec: TensorSpec) -> int:
    return math.prod(dim for dim in spec.shape if isinstance(dim, int))
