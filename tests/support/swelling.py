"""Messages that take far more memory once parsed than their bytes do, or much of the time of who parses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from wireedits import field, varint

from bf16kit.protocol import inference_pb2 as pb

_EMPTY_INPUT, _EMPTY_OUTPUT, _EMPTY_RAW = field(5, b""), field(6, b""), field(7, b"")


def _in_contents(data: bytes) -> bytes:
    """As the contents of ``lookup``'s one input."""
    head = pb.ModelInferRequest.InferInputTensor(name="ids", datatype="INT64", shape=[1, len(data)])
    return field(5, head.SerializeToString() + field(5, data))


def _distinct(nbytes: int) -> bytes:
    return b"".join(field(4, field(1, b"%07d" % number)) for number in range(nbytes // 11))


#: By what swells: a ModelInferRequest of about so many bytes.
SWELLING: Mapping[str, Callable[[int], bytes]] = {
    "inputs": lambda nbytes: _EMPTY_INPUT * (nbytes // 2),
    "outputs": lambda nbytes: _EMPTY_OUTPUT * (nbytes // 2),
    "raw_input_contents": lambda nbytes: _EMPTY_RAW * (nbytes // 2),
    "parameters": _distinct,
    "one parameter over and over": lambda nbytes: field(4, b"") * (nbytes // 2),
    "parameters of an input": lambda nbytes: field(5, field(4, b"") * (nbytes // 2)),
    "parameters of an output": lambda nbytes: field(6, field(2, b"") * (nbytes // 2)),
    "contents over and over": lambda nbytes: field(5, field(5, b"") * (nbytes // 2)),
    "shape": lambda nbytes: field(5, field(3, b"\x01" * nbytes)),
    "int64_contents": lambda nbytes: _in_contents(field(3, b"\x01" * nbytes)),
    "int64_contents one by one": lambda nbytes: _in_contents(b"\x18\x01" * (nbytes // 2)),
    "bytes_contents": lambda nbytes: _in_contents(field(8, b"") * (nbytes // 2)),
    "numbers nobody knows": lambda nbytes: b"\x50\x01" * (nbytes // 2),
    "groups nobody knows": lambda nbytes: b"\x53\x54" * (nbytes // 2),
    "a name of NULs": lambda nbytes: field(1, b"\0" * nbytes),
    "a name nobody can print": lambda nbytes: field(1, "\U000e0001".encode() * (nbytes // 4)),
    "a version": lambda nbytes: field(2, b"9" * nbytes),
    "a number of bytes without end": lambda nbytes: varint(10 << 3) + b"\xff" * nbytes,
}
