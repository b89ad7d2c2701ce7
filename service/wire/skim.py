"""Parses messages with limits on memory and time: a large message is skimmed before it is parsed.

An empty input is two bytes on the wire and some ninety in memory. 64 MiB of them took 2.7 GiB, and blocked the process
for two seconds, because protobuf holds Python's lock while it parses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from bf16kit.messages.errors import InvalidRequest

_SMALL = 16 << 10  # bytes; a smaller message is not checked: parsed, it takes 1 MiB at most
_MAX_FIELDS = 1 << 16  # the most fields of a larger message, nested ones included
_MAX_INTEGERS = 8 << 20  # the most integers in shapes and contents; each has one byte or more on the wire
_INTEGER_BYTES = 16  # bytes in memory: eight in the message, and eight in the array made from it
_FIELD_BYTES = 100  # bytes in memory of an empty field
_MAX_TEXT = 1 << 20  # the most bytes of a name, an id or other text: Python copies and hashes texts again and again
_MODEL_NAME, _MODEL_VERSION = 0x0A, 0x12  # tags of ModelInferRequest's first two fields, which are strings
_LONGEST_VARINT = 10  # bytes
_MAX_LEADING_FIELDS = 64  # the most fields that peek_model_and_version reads
_MAX_OUTER_FIELDS = 1 << 12  # the most outermost fields that peek_model reads
_FIXED = {1: 8, 2: 0, 5: 4}  # bytes of a value by wire type, if the field has no length

#: By field number: the fields of a nested message, 'text' for strings, 'packed' for integers that may be packed.
_Known: TypeAlias = "Mapping[int, _Known | Literal['text', 'packed']]"
_FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)  # of the same size on the wire as in memory


Parse: TypeAlias = Callable[[bytes, Callable[[int], None]], Message]


def parser(kind: Descriptor, max_bytes: int | None = None) -> Parse:
    """Return a parser of messages of this kind, of at most ``max_bytes``.

    The parser takes a message's bytes, and a function that is called with the memory in bytes that parsing will take;
    that function may raise. The parser raises InvalidRequest for a message that would take much more memory than its
    size, and protobuf's DecodeError for bytes that are no message. Large messages are parsed one at a time: if several
    threads parsed at once, all other threads would wait for all of them.
    """
    parse, known, one_at_a_time = GetMessageClass(kind).FromString, _known(kind), threading.Lock()

    def bounded(data: bytes, reserve: Callable[[int], None]) -> Message:
        if len(data) <= _SMALL:
            return parse(data)
        if max_bytes is not None and len(data) > max_bytes:
            raise InvalidRequest(f"the request has {len(data)} bytes, expected at most {max_bytes} for a {kind.name}")
        with one_at_a_time:
            reserve(len(data))  # others may have taken long, and the client may have left
            scanner = _Scanner(data)
            scanner.count(0, len(data), known)
            reserve(len(data) + scanner.extra_memory)
            return parse(data)

    return bounded


def peek_model_and_version(data: bytes) -> tuple[str, str]:
    """Return the model and version that a ModelInferRequest names in its first fields.

    protobuf's libraries write them first, since they write fields in order. Returns empty strings if the message does
    not begin with them, or may name another model in later fields.
    """
    name, at = _short_text(data, 0, _MODEL_NAME)
    version, at = _short_text(data, at, _MODEL_VERSION)
    return (name, version) if name and _names_no_model(data, at) else ("", "")


def peek_model(data: bytes) -> str:
    """Return the model that a ModelInferRequest of any size names, without parsing or copying it.

    Only its outermost fields are read. Returns "" if they name none, are not a message's, or are too many.
    """
    scanner, at, name = _Scanner(data), 0, b""
    try:
        for _ in range(_MAX_OUTER_FIELDS):
            if at >= len(data):
                break
            tag, at = scanner.varint(at)
            size = 0
            if tag & 7 == 2:
                size, at = scanner.varint(at)
            if tag == _MODEL_NAME:
                name = data[at : at + min(size, _MAX_TEXT)]
            at = scanner.varint(at)[1] if tag & 7 == 0 else at + size + _FIXED[tag & 7]
    except (IndexError, ValueError, KeyError):
        return ""
    return name.decode("utf-8", "replace")


def _names_no_model(data: bytes, at: int) -> bool:
    """Return whether the fields from ``at`` on certainly name no model or version: protobuf uses the last of two.

    All fields of a ModelInferRequest have a length; those of small requests a length of one or two bytes.
    """
    try:
        for _ in range(_MAX_LEADING_FIELDS):
            if at == len(data):
                return True
            tag, size = data[at], data[at + 1]
            if tag & 7 != 2 or tag >= 0x80 or tag in (_MODEL_NAME, _MODEL_VERSION):
                return False
            at += 2
            if size >= 0x80:
                more, at = data[at], at + 1
                if more >= 0x80:
                    return False
                size = size & 0x7F | more << 7
            at += size
    except IndexError:
        pass
    return False


def _short_text(data: bytes, at: int, tag: int) -> tuple[str, int]:
    """Return the text of less than 128 bytes in the field at ``at``, and its end; "" if another field is there."""
    start = at + 2
    if len(data) < start or data[at] != tag or data[at + 1] >= 0x80:
        return "", at
    end = start + data[at + 1]
    return data[start:end].decode("utf-8", "replace"), end


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
        try:
            while at < end:
                at = self._field(at, end, known)
        except (IndexError, ValueError):
            return

    def _field(self, at: int, end: int, known: _Known) -> int:
        """Return where the next field begins. Raises IndexError or ValueError if the message is broken."""
        self._fields += 1
        if self._fields > _MAX_FIELDS:
            raise InvalidRequest(
                f"the request has more than {_MAX_FIELDS} fields; send numbers in raw_input_contents, one field for"
                " each tensor, and fewer strings"
            )
        tag, at = self.varint(at)
        kind = tag & 7
        if kind == 2:
            size, at = self.varint(at)
            if tag >> 3 in known:
                self._count_value(at, min(at + size, end), known[tag >> 3])
            return at + size
        if kind == 0:
            return self.varint(at)[1]
        if kind > 5:
            raise ValueError
        return at + (8, 0, 0, 0, 4)[kind - 1]  # a group's start and end have no value; its fields follow as others do

    def _count_value(self, at: int, end: int, known: _Known | Literal["text", "packed"]) -> None:
        if known == "text":
            if end - at > _MAX_TEXT:
                raise InvalidRequest(f"the request has a string of {end - at} bytes, expected at most {_MAX_TEXT}")
            return
        if known != "packed":
            self.count(at, end, known)
            return
        # The last byte of each integer is below 0x80, and no other is.
        self._integers += int(np.count_nonzero(np.frombuffer(self._data, np.uint8)[at:end] < 0x80))
        if self._integers > _MAX_INTEGERS:
            raise InvalidRequest(
                f"the request has more than {_MAX_INTEGERS} integers in shapes and contents; send tensors in"
                " raw_input_contents"
            )

    def varint(self, at: int) -> tuple[int, int]:
        number = self._data[at]
        if number < 0x80:
            return number, at + 1
        number &= 0x7F
        for place in range(1, _LONGEST_VARINT):
            byte = self._data[at + place]
            number |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return number, at + place + 1
        raise ValueError


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
