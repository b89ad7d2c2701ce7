"""Checks of tensors in shared memory: read and written where the parameters say, and never outside their region."""

from __future__ import annotations

from collections.abc import Callable

from oip_conformance.checks.regions import (
    NEEDS,
    SIZE,
    SOURCE,
    Memory,
    RegionPlace,
    numeric_output,
    region,
    region_refusal,
    request_with_region,
)
from oip_conformance.checks.sources import OBSERVED
from oip_conformance.session import Session
from oip_conformance.suite import MUST, TRITON, Check, Code, Level, Skipped, check, must
from oip_conformance.target import Response
from oip_conformance.wire import DATATYPES, decode, encode, same

# --- tensors in regions ---------------------------------------------------------------------------------------------


@check(
    "memory.input", MUST, SOURCE, "An input may lie in a region; the offset is optional and defaults to zero.", NEEDS
)
def input_in_region(session: Session) -> None:
    plain = session.outputs(session.request())
    for offset in (0, 4096):
        with region(session) as memory:
            request = request_with_region(memory, offset=offset)
            for name, array in session.outputs(request).items():
                must(same(array, plain[name]), f"{name!r} as for the same data sent raw", array.ravel()[:4], request)


@check(
    "memory.output", MUST, SOURCE, "An output may be written to a region; its contents are not in the response.", NEEDS
)
def output_in_region(session: Session) -> None:
    model, name, size = numeric_output(session)
    plain = session.outputs(session.request())[name]
    with region(session) as memory:
        for offset in (None, 8192):
            request = session.request(outputs=[name])
            RegionPlace(memory.name, size, offset).put(request.outputs[0])
            response = session.infer(request)
            (output,) = response.outputs
            must(
                not output.HasField("contents") and not any(response.raw_output_contents),
                "no contents",
                response,
                request,
            )
            must(
                (output.name, output.datatype) == (name, next(s.datatype for s in model.outputs if s.name == name)),
                f"{name!r} and its datatype",
                output,
            )
            at = offset or 0
            array = decode(output.datatype, list(output.shape), memory.path.read_bytes()[at : at + size])
            must(same(array, plain), f"{name!r} in the region as in an answer", array.ravel()[:4], request)


@check("memory.larger-output", TRITON, OBSERVED, "A place for an output may be larger than the output.", NEEDS)
def larger_output(session: Session) -> None:
    _, name, size = numeric_output(session)
    with region(session) as memory:
        request = session.request(outputs=[name])
        RegionPlace(memory.name, size + 64).put(request.outputs[0])
        session.infer(request)
        rest = memory.path.read_bytes()[size:]
        must(not any(rest), "nothing written behind the output", "bytes that are not 0")


@check(
    "memory.memory-read-anew",
    MUST,
    SOURCE,
    "A region is memory, not a copy of it: what is written after it was registered is what is read.",
    NEEDS,
)
def read_anew(session: Session) -> None:
    with region(session) as memory:
        request = request_with_region(memory)
        first = session.outputs(request)
        data = [encode(tensor) for tensor in session.model.feeds().values()]
        kinds = [DATATYPES[tensor.datatype].numpy.kind for tensor in session.model.feeds().values()]
        if "f" not in kinds:
            raise Skipped("the model has no input of floats to change")
        at = 0
        for raw, kind in zip(data, kinds, strict=True):
            memory.write(bytes(len(raw)) if kind == "f" else raw, at)
            at += len(raw)
        plain = {name: tensor.array for name, tensor in session.model.feeds().items()}
        zeroed = session.request()
        for number, kind in enumerate(kinds):
            if kind == "f":
                zeroed.raw_input_contents[number] = bytes(len(data[number]))
        wanted = session.outputs(zeroed)
        found = session.outputs(request)
        must(
            plain and all(same(found[n], wanted[n]) for n in found), "the answer to what is in memory now", found, first
        )


def _at_input(
    name: str, level: Level, source: str, rule: str, codes: list[Code], place: Callable[[Memory, int], RegionPlace]
) -> tuple[Check, ...]:
    """Return checks that a wrong place of an input is rejected; ``place`` gets the region and the input's true size."""

    def call(memory: Memory) -> Response:
        session = memory.session
        size = len(session.request().raw_input_contents[0])
        return session.target.call(request_with_region(memory, place(memory, size)))

    return region_refusal(name, level, source, rule, codes, call)


_INVALID = [Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE]
_NOT_REGISTERED = [Code.NOT_FOUND, Code.INVALID_ARGUMENT]
_BOUNDS = "What is read lies within the region."
UNKNOWN_REGION = _at_input("input-unknown-region", MUST, SOURCE, "A region must be registered before it is used.", _NOT_REGISTERED, lambda m, size: RegionPlace(f"{m.name}-not", size))  # fmt: skip
WITHOUT_SIZE = _at_input("input-without-size", MUST, SOURCE, "shared_memory_region and shared_memory_byte_size are both given, or it is an error.", _INVALID, lambda m, size: RegionPlace(m.name, None))  # fmt: skip
SHORT = _at_input("input-too-short", TRITON, OBSERVED, "The size in the region is that of the shape.", _INVALID, lambda m, size: RegionPlace(m.name, size - 1))  # fmt: skip
LONG = _at_input("input-too-long", TRITON, OBSERVED, "The size in the region is that of the shape.", _INVALID, lambda m, size: RegionPlace(m.name, size + 4))  # fmt: skip
BEYOND = _at_input("input-beyond-the-end", TRITON, OBSERVED, _BOUNDS, _INVALID, lambda m, size: RegionPlace(m.name, size, SIZE - size + 1))  # fmt: skip
BEHIND = _at_input(
    "input-behind-the-end", TRITON, OBSERVED, _BOUNDS, _INVALID, lambda m, size: RegionPlace(m.name, size, SIZE)
)
NEGATIVE = _at_input(
    "input-negative-offset", TRITON, OBSERVED, _BOUNDS, _INVALID, lambda m, size: RegionPlace(m.name, size, -1)
)
FAR = _at_input(
    "input-overflow", TRITON, OBSERVED, _BOUNDS, _INVALID, lambda m, size: RegionPlace(m.name, size, 2**63 - 1)
)
NEGATIVE_SIZE = _at_input(
    "input-negative-size", TRITON, OBSERVED, _BOUNDS, _INVALID, lambda m, size: RegionPlace(m.name, -1)
)


def _with_contents(memory: Memory) -> Response:
    session = memory.session
    if session.model.raw_only:
        raise Skipped("the model has an FP16 or BF16 input, which have no contents")
    request = request_with_region(memory)
    request.inputs[0].contents.CopyFrom(session.request(typed=True).inputs[0].contents)
    return session.target.call(request)


AND_CONTENTS = region_refusal("input-and-contents", MUST, SOURCE, "When these parameters are set for an input the contents field must not be set.", _INVALID, _with_contents)  # fmt: skip


def _output_at(place: Callable[[Memory, int], RegionPlace]) -> Callable[[Memory], Response]:
    def call(memory: Memory) -> Response:
        _, name, size = numeric_output(memory.session)
        request = memory.session.request(outputs=[name])
        place(memory, size).put(request.outputs[0])
        response = memory.session.target.call(request)
        must(not any(memory.path.read_bytes()) or response.ok, "nothing written of an answer that is rejected", "bytes")
        return response

    return call


OUTPUT_SHORT = region_refusal("output-too-short", TRITON, OBSERVED, "A place for an output holds all of it.", [*_INVALID, Code.INTERNAL], _output_at(lambda m, size: RegionPlace(m.name, size - 1)))  # fmt: skip
OUTPUT_UNKNOWN = region_refusal("output-unknown-region", MUST, SOURCE, "A region must be registered before it is used.", _NOT_REGISTERED, _output_at(lambda m, size: RegionPlace(f"{m.name}-not", size)))  # fmt: skip
OUTPUT_BEYOND = region_refusal("output-beyond-the-end", TRITON, OBSERVED, "What is written lies within the region.", _INVALID, _output_at(lambda m, size: RegionPlace(m.name, size, SIZE - size + 1)))  # fmt: skip
OUTPUT_FAR = region_refusal("output-overflow", TRITON, OBSERVED, "What is written lies within the region.", _INVALID, _output_at(lambda m, size: RegionPlace(m.name, size, 2**63 - 1)))  # fmt: skip
