"""Checks that the strings of an ONNX file are valid text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import ModelProto, TensorProto

from bf16kit.messages.errors import SourceError

_UNREAD = ("doc_string", "metadata_props")  # dropped, so not checked
_SHOWN = 40  # bytes of an invalid string


def check_texts(path: Path, model: ModelProto) -> None:
    """Raise :class:`SourceError` for a string that is not UTF-8, which protobuf returns as bytes."""
    for place, text in _strings(model):
        if isinstance(text, bytes):
            raise SourceError(f"{path}: damaged: {place} {text[:_SHOWN]!r} is not UTF-8")


def _strings(model: ModelProto) -> Iterator[tuple[str, str | bytes]]:
    """Yield every string of ``model`` except tensor data, with its message and field."""
    todo: list[Message] = [model]
    while todo:
        message = todo.pop()
        if isinstance(message, TensorProto):  # listing its fields would copy its data
            yield "TensorProto.name", message.name
            todo += message.external_data
            continue
        for field, value in message.ListFields():
            if field.name in _UNREAD:
                continue
            values = value if field.is_repeated else [value]
            if field.type == FieldDescriptor.TYPE_STRING:
                yield from ((f"{message.DESCRIPTOR.name}.{field.name}", text) for text in values)
            elif field.type == FieldDescriptor.TYPE_MESSAGE:
                todo += values
