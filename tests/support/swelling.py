"""Messages that need far more memory when parsed than their size, or much time to parse."""

import gzip
import struct
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from wireedits import field, varint

from bench.serving.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, frame, request_headers
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.grpc.handlers import SERVICE

_EMPTY_INPUT, _EMPTY_OUTPUT, _EMPTY_RAW = field(5, b""), field(6, b""), field(7, b"")


def _in_contents(data: bytes) -> bytes:
    """Return a request field: the input of ``lookup`` with ``data`` as its contents."""
    head = pb.ModelInferRequest.InferInputTensor(name="ids", datatype="INT64", shape=[1, len(data)])
    return field(5, head.SerializeToString() + field(5, data))


def _distinct(nbytes: int) -> bytes:
    return b"".join(field(4, field(1, b"%07d" % number)) for number in range(nbytes // 11))


def _strings(count: int) -> bytes:
    message = pb.ModelInferRequest(model_name="words")
    message.inputs.add(name="BYTES", datatype="BYTES", shape=[count // 2, 2])
    message.raw_input_contents.append(b"\2\0\0\0ab" * (count // 2 * 2))
    return message.SerializeToString()


#: By the part of the message that grows: a function that makes a ModelInferRequest of about that many bytes.
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
    "strings": lambda nbytes: _strings(nbytes // 6),
    "numbers nobody knows": lambda nbytes: b"\x50\x01" * (nbytes // 2),
    "groups nobody knows": lambda nbytes: b"\x53\x54" * (nbytes // 2),
    "a name of NULs": lambda nbytes: field(1, b"\0" * nbytes),
    "a name nobody can print": lambda nbytes: field(1, "\U000e0001".encode() * (nbytes // 4)),
    "a version": lambda nbytes: field(2, b"9" * nbytes),
    "a number of bytes without end": lambda nbytes: varint(10 << 3) + b"\xff" * nbytes,
}

_FRAME = 16 << 10
_LOOKUP = pb.ModelInferRequest(model_name="lookup").SerializeToString()


def send_swelling(address: str, together: int, nbytes: int) -> set[str]:
    """Send each message of :data:`SWELLING` to ``lookup``, ``together`` at once, and return the status codes.

    Run this in a separate process: making and sending the messages takes all of the interpreter's time.
    """
    codes = set()
    for name, make in SWELLING.items():
        data = (b"" if name.startswith("a name") else _LOOKUP) + make(nbytes)
        codes |= _codes(address, f"/{SERVICE}/ModelInfer", data, together)
    return codes


def bomb(path: str, port: int, nbytes: int) -> bytes:
    """Return the frames of a connection's first call: a request of ``nbytes``, compressed to a thousandth of that."""
    data = gzip.compress(_LOOKUP + field(4, bytes(nbytes)))
    body = b"\x01" + struct.pack("!I", len(data)) + data
    coding = b"\0" + bytes((13,)) + b"grpc-encoding" + bytes((4,)) + b"gzip"
    pieces = [body[at : at + _FRAME] for at in range(0, len(body), _FRAME)]
    frames = [frame(DATA, 0, 1, piece) for piece in pieces[:-1]] + [frame(DATA, END_STREAM, 1, pieces[-1])]
    return frame(HEADERS, END_HEADERS, 1, request_headers(path, port) + coding) + b"".join(frames)


def _codes(address: str, path: str, data: bytes, together: int) -> set[str]:
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(path)
        return {future.code().name for future in [call.future(data, timeout=60) for _ in range(together)]}
