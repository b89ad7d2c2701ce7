"""Checks of calls that end early, and of malicious messages; after each the server must serve as before."""

from __future__ import annotations

import struct

from oip_conformance.checks.metadata import UNKNOWN_NAME
from oip_conformance.checks.sources import GRPC, OBSERVED
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.session import Session
from oip_conformance.suite import MUST, SHOULD, TRITON, Code, check, must
from oip_conformance.target import SERVICE

_REFUSED = (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED, Code.NOT_FOUND, Code.OUT_OF_RANGE)


@check(
    "call.deadline",
    MUST,
    GRPC,
    "A request whose deadline passes is DEADLINE_EXCEEDED, unless it was answered in time; the server goes on serving.",
)
def deadline(session: Session) -> None:
    for microseconds in (1, 10, 100, 1000, 10_000):
        response = session.target.call(session.request(), timeout=microseconds / 1e6)
        in_time = response.ok or response.code is Code.DEADLINE_EXCEEDED
        must(in_time, "DEADLINE_EXCEEDED, or an answer", response, f"a deadline of {microseconds} microseconds")
    session.alive()


@check("call.cancelled", MUST, GRPC, "A call may be cancelled at any time; the server goes on serving.")
def cancelled(session: Session) -> None:
    for _ in range(8):
        session.target.start(session.request()).cancel()
    session.alive()


@check("call.large-id", TRITON, OBSERVED, "An id of 5 MB is returned, or the message is rejected for its size.")
def large_id(session: Session) -> None:
    request = session.request(request_id="i" * 5_000_000)
    response = session.target.call(request)
    must(response.ok or response.code in _REFUSED, "an answer, or a rejection for the size", response, "an id of 5 MB")
    if response.ok:
        must(response.message.id == request.id, "the id", f"one of {len(response.message.id)} characters")
    session.alive()


@check(
    "call.long-model-name",
    SHOULD,
    GRPC,
    "A rejection is small enough for gRPC to carry (8 KB of metadata), whatever it quotes.",
)
def long_model_name(session: Session) -> None:
    request = session.request()
    request.model_name = UNKNOWN_NAME * 4000
    response = session.target.call(request)
    session.alive()
    must(
        response.code in (Code.NOT_FOUND, Code.INVALID_ARGUMENT),
        "NOT_FOUND or INVALID_ARGUMENT",
        response,
        "a model's name of 100 kB",
    )


@check("call.many-dimensions", TRITON, OBSERVED, "A shape of 100,000 dimensions is rejected.")
def many_dimensions(session: Session) -> None:
    request = session.request()
    request.inputs[0].shape[:] = [1] * 100_000
    response = session.target.call(request)
    session.alive()
    must(not response.ok, "a rejection", response, "a shape of 100,000 dimensions")


@check("call.many-inputs", TRITON, OBSERVED, "Ten thousand inputs do not hurt the server.")
def many_inputs(session: Session) -> None:
    request = session.request()
    for number in range(10_000):
        request.inputs.add(name=f"i{number}", datatype="FP32", shape=[1])
        request.raw_input_contents.append(bytes(4))
    response = session.target.call(request)
    session.alive()
    must(
        response.code not in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED),
        "an answer or a rejection",
        response,
        "10,000 inputs",
    )


@check("call.truncated", MUST, GRPC, "A message that ends inside a field is rejected.")
def truncated(session: Session) -> None:
    message = session.request().SerializeToString()
    for size in (1, len(message) // 2, len(message) - 1):
        data = message[:size]
        if _parses(data):
            continue  # the cut is between two fields
        response = session.target.raw(f"/{SERVICE}/ModelInfer", data)
        must(not response.ok, "a rejection", response, f"the first {size} of {len(message)} bytes of a request")
    session.alive()


@check(
    "call.announced-length",
    MUST,
    GRPC,
    "A field that announces 2 GB and has none is rejected, and no memory is allocated for it.",
)
def announced_length(session: Session) -> None:
    huge = b"\x3a" + b"\xff\xff\xff\xff\x07" + struct.pack("<I", 1)  # raw_input_contents of 2^31 - 1 bytes
    response = session.target.raw(f"/{SERVICE}/ModelInfer", huge)
    must(not response.ok, "a rejection", response, "raw_input_contents that announce 2 GB")
    session.alive()


def _parses(data: bytes) -> bool:
    try:
        pb.ModelInferRequest.FromString(data)
    except Exception:  # noqa: BLE001 -- protobuf's implementations raise errors of their own
        return False
    return True
