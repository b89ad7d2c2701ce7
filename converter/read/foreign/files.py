"""Recognises foreign files by their first bytes or, if those could be ONNX, by the fields that follow."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"GGUF", "gguf"),
    (b"lmgg", "ggml"),  # "ggml", "ggmf" and "ggjt" as little-endian numbers
    (b"fmgg", "ggml"),
    (b"tjgg", "ggml"),
    (b"ftrt", "tensorrt"),
    (b"ptrt", "tensorrt"),
    (b"\x93NUMPY", "numpy"),
    (b"\x89HDF\r\n\x1a\n", "hdf5"),
    (b"\x12\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0", "mxnet"),  # a list of arrays, 0x112, and a reserved word
    (b"7767517\n", "ncnn"),
    (b"\x1f\x8b\x08", "archive"),
    (b"\x28\xb5\x2f\xfd", "archive"),
    (b"\xfd7zXZ\0", "archive"),
    (b"7z\xbc\xaf\x27\x1c", "archive"),
    (b"Rar!\x1a\x07", "archive"),
)
# FlatBuffer file identifiers, at byte 4.
_FLATBUFFERS = {b"TFL3": "tflite", b"ORTM": "ort", b"PTMF": "mobile", b"ET12": "executorch"}
_TABLE_END = (0xDB4775248B80FB57).to_bytes(8, "little")  # end of TensorFlow's .index files, which are LevelDB tables
_METADATA = 1 << 20  # bytes of JSON that Ultralytics writes before an engine
_FIELDS = 4096  # of a protobuf message that are read
_COREML = 200  # the fields that hold a Core ML model begin here; no field of ONNX's ModelProto has such a number


def of_file(path: Path, head: bytes) -> str | None:
    """Return the foreign format of the file at ``path``, or None.

    The format is a key of :data:`~converter.read.foreign.table.TABLE`.
    """
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[4:8] in _FLATBUFFERS:
        return _FLATBUFFERS[head[4:8]]
    if head[257:262] == b"ustar" or (head.startswith(b"BZh") and head[4:10] == b"1AY&SY"):
        return "archive"
    if _is_openvino(head):
        return "openvino"
    if _is_saved_model(head):
        return "saved model graph"
    with path.open("rb") as file:
        if _is_wrapped_engine(file, head):
            return "tensorrt"
        if _is_table(file):
            return "tensorflow checkpoint"
        if head[0] == 0x08 and _is_coreml(file):
            return "coreml"
    return "tensorflow graph" if _is_graph(head) else None


def _is_openvino(head: bytes) -> bool:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return text.startswith(b"<net ") or (text.startswith(b"<?xml") and b"<net " in text)


def _is_saved_model(head: bytes) -> bool:
    """Return whether ``head`` begins like saved_model.pb: schema version 1, a graph whose first field is a message.

    In ONNX the second field is the producer's name, which does not begin with a newline.
    """
    if not head.startswith(b"\x08\x01\x12"):
        return False
    end = next((at for at in range(3, len(head)) if head[at] < 0x80), len(head))
    return head[end + 1 : end + 2] == b"\x0a"


def _is_wrapped_engine(file: BinaryIO, head: bytes) -> bool:
    size = int.from_bytes(head[:4], "little")
    if head[4:5] != b"{" or not 0 < size <= _METADATA:
        return False
    file.seek(4 + size)
    return file.read(4) in (b"ftrt", b"ptrt")


def _is_table(file: BinaryIO) -> bool:
    size = file.seek(0, 2)
    if size < 48:  # the footer of a table
        return False
    file.seek(size - 8)
    return file.read(8) == _TABLE_END


def _is_coreml(file: BinaryIO) -> bool:
    """Return whether the protobuf message in ``file`` has a field that only a Core ML model has.

    Both begin with a version, so the first bytes do not distinguish them. Only keys and lengths are read.
    """
    size = file.seek(0, 2)
    file.seek(0)
    for _ in range(_FIELDS):
        key = _varint(file)
        if key is None:
            return False
        if key >> 3 >= _COREML:
            return True
        if key & 7 == 0:
            skipped = 0 if _varint(file) is not None else size
        elif key & 7 == 2:
            length = _varint(file)
            skipped = size if length is None else length
        else:
            skipped = {1: 8, 5: 4}.get(key & 7, size)
        if file.tell() + skipped > size:
            return False
        file.seek(skipped, 1)
    return False


def _varint(file: BinaryIO) -> int | None:
    """Read the next number of a protobuf message; None at the end, or if there is none."""
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    return None


def _is_graph(head: bytes) -> bool:
    """Return whether ``head`` begins like a GraphDef, with a NodeDef of a name and an operator: 0a … 0a NAME 12 OP."""
    if head[0] != 0x0A:
        return False
    at = 1
    while at < min(len(head), 6) and head[at] >= 0x80:
        at += 1
    name = _text(head, at + 1, 0x0A)
    return name is not None and _text(head, name, 0x12) is not None


def _text(head: bytes, at: int, key: int) -> int | None:
    """Return the end of the text (under 128 bytes) that follows ``key`` at ``at``; None if there is none."""
    if len(head) < at + 2 or head[at] != key or not 0 < head[at + 1] < 0x80:
        return None
    end = at + 2 + head[at + 1]
    text = head[at + 2 : end]
    return end if len(text) == head[at + 1] and all(0x20 <= byte < 0x7F for byte in text) else None
