"""Whether what an ONNX file calls things is text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import ModelProto, TensorProto

from bf16kit.errors import SourceError

_UNREAD = ("doc_string", "metadata_props")  # dropped, whatever they say
_SHOWN = 40  # bytes of what is no text


def check_texts(path: Path, model: ModelProto) -> None:
    """:class:`SourceError` for a string that is not UTF-8, which protobuf hands on as bytes."""
    for place, text in _strings(model):
        if isinstance(text, bytes):
            raise SourceError(f"{path}: damaged: {place} {text[:_SHOWN]!r} is not UTF-8")


def _strings(model: ModelProto) -> Iterator[tuple[str, str | bytes]]:
    """Every string of ``model`` but the data of tensors, and the message and field it is in."""
    todo: list[Message] = [model]
    while todo:
        message = todo.pop()
        if isinstance(message, TensorProto):  # its fields are not listed, as that copies its data
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
