"""Checks of each datatype, raw and in its typed field, on any model that takes it; and of the framing of BYTES."""

from __future__ import annotations

import struct
from collections.abc import Callable

from oip_conformance.checks.sources import OBSERVED, OIP
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.session import Session
from oip_conformance.suite import MUST, TRITON, Check, Code, InvalidCall, must, refusal
from oip_conformance.wire import DATATYPES, encode, fill_contents, same


def _raw(datatype: str) -> Callable[[Session], None]:
    def run(session: Session) -> None:
        model, _ = session.with_input(datatype)
        session.outputs(session.request(model), model)

    return run


def _typed(datatype: str) -> Callable[[Session], None]:
    def run(session: Session) -> None:
        model, _ = session.with_input(datatype, typed=True)
        found = session.outputs(session.request(model, typed=True), model)
        raw = session.outputs(session.request(model), model)
        for output, array in found.items():
            must(same(array, raw[output]), f"{output!r} as for the raw data", array.ravel()[:4])

    return run


RAW = tuple(
    Check(f"datatype.{name}.raw", MUST, OIP, f"{name} travels in raw_input_contents, little-endian and row-major.", _raw(name))
    for name in DATATYPES
)  # fmt: skip
TYPED = tuple(
    Check(f"datatype.{name}.typed", MUST, OIP, f"{name} travels in {kind.field}.", _typed(name))
    for name, kind in DATATYPES.items()
    if kind.field
)


def _typed_half(datatype: str) -> Callable[[Session], InvalidCall]:
    def make_call(session: Session) -> InvalidCall:
        model, name = session.with_input(datatype)
        message = pb.ModelInferRequest(model_name=model.name)
        for key, tensor in model.feeds().items():
            made = message.inputs.add(name=key, datatype=tensor.datatype, shape=tensor.array.shape)
            if DATATYPES[tensor.datatype].field:
                fill_contents(tensor, made.contents)
            else:
                made.contents.fp32_contents.extend([1.0] * tensor.array.size)
        raw_only = [spec.name for spec in model.inputs if DATATYPES[spec.datatype].field is None]
        return InvalidCall(message, [name, *raw_only])

    return make_call


FP16_TYPED, BF16_TYPED = (
    refusal(
        f"datatype.{name}.typed", MUST, OIP, f"{name} must be raw, as no field is of a 16-bit float type.",
        [Code.INVALID_ARGUMENT], _typed_half(name),
    )
    for name in ("FP16", "BF16")
)  # fmt: skip


def _framed(frame: Callable[[bytes], bytes]) -> Callable[[Session], InvalidCall]:
    def make_call(session: Session) -> InvalidCall:
        model, name = session.with_input("BYTES")
        request = session.request(model)
        at = [tensor.name for tensor in request.inputs].index(name)
        request.raw_input_contents[at] = frame(encode(model.feed(name)))
        return InvalidCall(request, [name])

    return make_call


_FRAMING = "BYTES: a 4-byte little-endian length before each element, as many elements as the shape has."
BYTES_SHORT, BYTES_PAST_END, BYTES_FEWER, BYTES_MORE, BYTES_HUGE = (
    refusal(f"datatype.BYTES.{name}", TRITON, OBSERVED, _FRAMING, [Code.INVALID_ARGUMENT], _framed(frame))
    for name, frame in (
        ("cut-length", lambda raw: b"\x01\x00"),
        ("past-the-end", lambda raw: raw[:-1]),
        ("fewer", lambda raw: b""),
        ("more", lambda raw: raw + struct.pack("<I", 1) + b"a"),
        ("4-GB-element", lambda raw: b"\xff\xff\xff\xff" + raw[4:]),
    )
)  # fmt: skip
