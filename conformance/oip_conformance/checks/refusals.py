"""Checks of requests that must be rejected: unknown models and versions, inputs and outputs that do not fit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from oip_conformance.checks.metadata import UNKNOWN_NAME
from oip_conformance.checks.sources import OBSERVED, OIP
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.session import Session
from oip_conformance.suite import MUST, TRITON, Check, Code, InvalidCall, Level, Skipped, refusal
from oip_conformance.wire import DATATYPES, encode, filled

Edit = Callable[[Session, pb.ModelInferRequest], list[str]]
_INVALID = [Code.INVALID_ARGUMENT]
_MATCH = "For each tensor, the size of the content must match what is expected by its shape and data type."


def _bad(
    name: str, level: Level, source: str, rule: str, edit: Edit, codes: list[Code] = _INVALID
) -> tuple[Check, ...]:
    """Return checks of a request that is valid except for ``edit``; it returns words that a rejection should name."""

    def make_call(session: Session) -> InvalidCall:
        request = session.request()
        return InvalidCall(request, edit(session, request))

    return refusal(f"request.{name}", level, source, rule, codes, make_call)


def _first(request: pb.ModelInferRequest) -> pb.ModelInferRequest.InferInputTensor:
    return request.inputs[0]


def _unknown_model(session: Session, request: pb.ModelInferRequest) -> list[str]:
    request.model_name = UNKNOWN_NAME
    return [UNKNOWN_NAME]


def _no_model(session: Session, request: pb.ModelInferRequest) -> list[str]:
    request.model_name = ""
    return []


def _version(version: str) -> Edit:
    def edit(session: Session, request: pb.ModelInferRequest) -> list[str]:
        request.model_version = version
        return [version]

    return edit


def _no_inputs(session: Session, request: pb.ModelInferRequest) -> list[str]:
    names = [tensor.name for tensor in request.inputs]
    if {*names} <= session.model.optional:
        raise Skipped("every input of the model is optional")
    del request.inputs[:], request.raw_input_contents[:]
    return names


def _missing_input(session: Session) -> InvalidCall:
    model, needed = session.several_inputs()
    feeds = {name: tensor for name, tensor in model.feeds().items() if name != needed[-1]}
    return InvalidCall(session.request(model, feeds=feeds), [needed[-1]])


def _extra_input(session: Session, request: pb.ModelInferRequest) -> list[str]:
    request.inputs.add(name="conformance-extra", datatype="FP32", shape=[1, 1])
    request.raw_input_contents.append(bytes(4))
    return ["conformance-extra"]


def _renamed_input(session: Session, request: pb.ModelInferRequest) -> list[str]:
    missing = _first(request).name
    _first(request).name = "conformance-other"
    return ["conformance-other", missing]


def _same_input_twice(session: Session, request: pb.ModelInferRequest) -> list[str]:
    request.inputs.add().CopyFrom(_first(request))
    request.raw_input_contents.append(request.raw_input_contents[0])
    return [_first(request).name]


def _other_datatype(session: Session, request: pb.ModelInferRequest) -> list[str]:
    tensor = _first(request)
    size = DATATYPES[tensor.datatype].numpy.itemsize
    others = ("INT32", "INT64", "UINT8", "UINT32", "UINT64", "INT16", "BOOL")
    same_size = (n for n in others if n != tensor.datatype and DATATYPES[n].numpy.itemsize == size)
    other = next(same_size, "INT32")
    tensor.datatype = other
    if DATATYPES[session.model.inputs[0].datatype].framed:
        request.raw_input_contents[0] = bytes(4 * int(np.prod(tensor.shape)))
    return [tensor.name, other]


def _no_datatype(name: str) -> Edit:
    def edit(session: Session, request: pb.ModelInferRequest) -> list[str]:
        _first(request).datatype = name
        return [_first(request).name]

    return edit


def _reshaped(change: Callable[[list[int], list[int]], list[int] | None]) -> Edit:
    """Return an edit to another shape with matching bytes; ``change`` gets the tensor's shape and the metadata's."""

    def edit(session: Session, request: pb.ModelInferRequest) -> list[str]:
        for at, tensor in enumerate(request.inputs):
            spec = next(spec for spec in session.model.inputs if spec.name == tensor.name)
            shape = change(list(tensor.shape), list(spec.shape))
            if shape is not None:
                tensor.shape[:] = shape
                request.raw_input_contents[at] = encode(filled(tensor.datatype, shape))
                return [tensor.name]
        raise Skipped("no input of the model has a fixed size")

    return edit


def _fixed_size(shape: list[int], promised: list[int]) -> list[int] | None:
    fixed = [k for k, size in enumerate(promised) if size > 0]
    return [size + (k == fixed[-1]) for k, size in enumerate(shape)] if fixed else None


def _shape_only(change: Callable[[list[int]], list[int]]) -> Edit:
    def edit(session: Session, request: pb.ModelInferRequest) -> list[str]:
        tensor = _first(request)
        if not tensor.shape:
            raise Skipped("the model's first input is a scalar")
        tensor.shape[:] = change(list(tensor.shape))
        return [tensor.name]

    return edit


def _raw_of(change: Callable[[bytes], bytes]) -> Edit:
    def edit(session: Session, request: pb.ModelInferRequest) -> list[str]:
        request.raw_input_contents[0] = change(request.raw_input_contents[0])
        return [_first(request).name]

    return edit


def _no_data(session: Session, request: pb.ModelInferRequest) -> list[str]:
    del request.raw_input_contents[:]
    return [tensor.name for tensor in request.inputs]


def _raw_for_all_but_one(session: Session) -> InvalidCall:
    model, needed = session.several_inputs()
    request = session.request(model)
    del request.raw_input_contents[-1]
    return InvalidCall(request, ["raw_input_contents", *needed])


def _both(session: Session, request: pb.ModelInferRequest) -> list[str]:
    typed = _typed(session)
    _first(request).contents.CopyFrom(typed.inputs[0].contents)
    return ["raw_input_contents", "contents"]


def _typed(session: Session) -> pb.ModelInferRequest:
    if session.model.raw_only:
        raise Skipped("the model has an FP16 or BF16 input, which travel raw only")
    return session.request(typed=True)


def _field(tensor: pb.ModelInferRequest.InferInputTensor) -> str:
    return DATATYPES[tensor.datatype].field or ""


def _typed_of(change: Callable[[pb.ModelInferRequest.InferInputTensor], None]) -> Edit:
    def edit(session: Session, request: pb.ModelInferRequest) -> list[str]:
        request.CopyFrom(_typed(session))
        change(_first(request))
        return [_first(request).name]

    return edit


def _one_value_less(tensor: pb.ModelInferRequest.InferInputTensor) -> None:
    del getattr(tensor.contents, _field(tensor))[-1]


def _one_value_more(tensor: pb.ModelInferRequest.InferInputTensor) -> None:
    values = getattr(tensor.contents, _field(tensor))
    values.append(values[0])


def _other_field(tensor: pb.ModelInferRequest.InferInputTensor) -> None:
    count = len(getattr(tensor.contents, _field(tensor)))
    tensor.contents.Clear()
    if _field(tensor) == "fp64_contents":
        tensor.contents.fp32_contents.extend([1.0] * count)
    else:
        tensor.contents.fp64_contents.extend([1.0] * count)


def _unknown_output(session: Session, request: pb.ModelInferRequest) -> list[str]:
    request.outputs.add(name="conformance-no-such-output")
    return ["conformance-no-such-output"]


UNKNOWN_MODEL = _bad("unknown-model", MUST, OIP, "An unknown model is an error.", _unknown_model, [Code.NOT_FOUND])
NO_MODEL = _bad("no-model", MUST, OIP, "A request names its model.", _no_model, [Code.NOT_FOUND, Code.INVALID_ARGUMENT])
UNKNOWN_VERSION = _bad(
    "unknown-version", MUST, OIP, "An unknown version is an error.", _version("987654321"), [Code.NOT_FOUND]
)
VERSION_A_WORD = _bad("version-a-word", TRITON, OBSERVED, "A version is a number.", _version("newest"))
VERSION_NEGATIVE = _bad("version-negative", TRITON, OBSERVED, "A version is not negative.", _version("-1"))
VERSION_TOO_LARGE = _bad("version-30-digits", TRITON, OBSERVED, "A version is a number of 64 bits.", _version("9" * 30), [Code.INVALID_ARGUMENT, Code.NOT_FOUND])  # fmt: skip
NO_INPUTS = _bad("no-inputs", TRITON, OBSERVED, "Every input that is not optional must be given.", _no_inputs)
MISSING_INPUT = refusal("request.missing-input", TRITON, OBSERVED, "Every input that is not optional must be given.", _INVALID, _missing_input)  # fmt: skip
EXTRA_INPUT = _bad("extra-input", TRITON, OBSERVED, "Inputs that the model does not have are rejected.", _extra_input)
RENAMED_INPUT = _bad("unknown-input", TRITON, OBSERVED, "Inputs that the model does not have are rejected.", _renamed_input)  # fmt: skip
SAME_INPUT_TWICE = _bad("same-input-twice", TRITON, OBSERVED, "Each input is given once.", _same_input_twice)
OTHER_DATATYPE = _bad("other-datatype", TRITON, OBSERVED, "An input has the datatype of the metadata.", _other_datatype)
UNKNOWN_DATATYPE = _bad(
    "unknown-datatype", TRITON, OBSERVED, "A datatype is one of the protocol's.", _no_datatype("FLOAT")
)
LOWERCASE_DATATYPE = _bad(
    "lowercase-datatype", TRITON, OBSERVED, "A datatype is written in capitals.", _no_datatype("fp32")
)
NO_DATATYPE = _bad("no-datatype", TRITON, OBSERVED, "An input names its datatype.", _no_datatype(""))
OTHER_SIZE = _bad("other-size", TRITON, OBSERVED, "An input has the sizes of the metadata.", _reshaped(_fixed_size))
RANK_TOO_HIGH = _bad("rank-too-high", TRITON, OBSERVED, "An input has as many dimensions as the metadata.", _reshaped(lambda shape, _: [*shape, 1]))  # fmt: skip
RANK_TOO_LOW = _bad("no-shape", TRITON, OBSERVED, "An input has a shape.", _shape_only(lambda shape: []))
NEGATIVE_SIZE = _bad("negative-size", TRITON, OBSERVED, "Sizes in a request are not negative.", _shape_only(lambda shape: [-1, *shape[1:]]))  # fmt: skip
ALL_NEGATIVE = _bad("sizes-negative-alike", TRITON, OBSERVED, "Sizes in a request are not negative, even where their product is not.", _shape_only(lambda shape: [-size for size in shape] if len(shape) > 1 else [-1]))  # fmt: skip
HUGE_SIZE = _bad("huge-size", MUST, OIP, _MATCH, _shape_only(lambda shape: [2**63 - 1, *shape[1:]]))
HUGE_SIZE_32 = _bad("huge-size-in-32-bits", MUST, OIP, _MATCH, _shape_only(lambda shape: [shape[0] + 2**33, *shape[1:]]))  # fmt: skip
SHORT = _bad("raw-too-short", MUST, OIP, _MATCH, _raw_of(lambda raw: raw[:-1]))
LONG = _bad("raw-too-long", MUST, OIP, _MATCH, _raw_of(lambda raw: raw + raw))
EMPTY = _bad("raw-empty", MUST, OIP, _MATCH, _raw_of(lambda raw: b""))
NO_DATA = _bad("no-data", MUST, OIP, _MATCH, _no_data)
RAW_FOR_SOME = refusal("request.raw-for-some", MUST, OIP, "raw_input_contents must be initialized with data for each tensor.", _INVALID, _raw_for_all_but_one)  # fmt: skip
RAW_AND_TYPED = _bad("raw-and-typed", MUST, OIP, "If raw_input_contents is specified then contents must not be specified for any input tensor.", _both)  # fmt: skip
TYPED_SHORT = _bad("typed-too-short", MUST, OIP, "The size of typed contents must match what is expected by the tensor's shape.", _typed_of(_one_value_less))  # fmt: skip
TYPED_LONG = _bad("typed-too-long", MUST, OIP, "The size of typed contents must match what is expected by the tensor's shape.", _typed_of(_one_value_more))  # fmt: skip
TYPED_ELSEWHERE = _bad("typed-in-another-field", MUST, OIP, "Typed data is in the repeated field that matches the tensor's data type.", _typed_of(_other_field))  # fmt: skip
UNKNOWN_OUTPUT = _bad(
    "unknown-output", TRITON, OBSERVED, "Outputs that the model does not have are rejected.", _unknown_output
)


def _too_many_rows(session: Session) -> InvalidCall:
    model = session.batching(1)
    if model.max_batch_size > 4096:
        raise Skipped(f"the largest batch is of {model.max_batch_size} rows")
    return InvalidCall(session.request(model, rows=model.max_batch_size + 1), [str(model.max_batch_size), "batch"])


TOO_MANY_ROWS = refusal(
    "request.batch-too-large", TRITON, OBSERVED, "No more rows than max_batch_size come in one request.", _INVALID,
    _too_many_rows, "model_configuration",
)  # fmt: skip
