"""Checks of the classification extension: an output as its highest values, "value:index" or with a label."""

from __future__ import annotations

import re

import numpy as np

from oip_conformance import judging
from oip_conformance.checks.sources import OBSERVED, extension
from oip_conformance.models import Model
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.session import Session
from oip_conformance.suite import MUST, TRITON, Code, InvalidCall, Skipped, check, must, refusal
from oip_conformance.wire import Array

_NEEDS = "classification"
_SOURCE = extension(_NEEDS)
_CLASS = re.compile(r"(-?(?:[\d.]+(?:e[+-]?\d+)?|nan|inf)):(\d+)(?::(.*))?", re.DOTALL)
_NUMBERS = ("FP32", "FP64", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")


def _output(session: Session) -> tuple[Model, str, Array]:
    """Return a model's numeric output, and its values."""
    model, name = session.with_output(*_NUMBERS)
    array = session.outputs(session.request(model), model)[name]
    if array.ndim < 1 or not array.size or (model.max_batch_size > 0 and array.ndim < 2):
        raise Skipped(f"output {name!r} of {model.name!r} has no classes")
    return model, name, array


def _request(session: Session, model: Model, name: str, count: int, rows: int = 1) -> pb.ModelInferRequest:
    request = session.request(model, rows=rows, outputs=[name])
    request.outputs[0].parameters["classification"].int64_param = count
    return request


def _classes(session: Session, request: pb.ModelInferRequest) -> tuple[list[int], list[str]]:
    response = session.infer(request)
    (output,) = response.outputs
    must(output.datatype == "BYTES", "BYTES", output.datatype, request)
    raw = response.raw_output_contents[0] if response.raw_output_contents else None
    array = judging.read(output, raw, request)
    return list(output.shape), [element.decode() for element in array.ravel()]


@check(
    "classification.format",
    MUST,
    _SOURCE,
    'The elements are "<value>:<index>[:<label>]", the n highest-valued first.',
    _NEEDS,
)
def written(session: Session) -> None:
    model, name, array = _output(session)
    request = _request(session, model, name, 3)
    _, classes = _classes(session, request)
    values = array.astype(np.float64).ravel()
    highest = np.sort(values)[::-1]
    for rank, text in enumerate(classes):
        found = _CLASS.fullmatch(text)
        must(found, "<value>:<index>[:<label>]", repr(text), request)
        if found is None:
            return
        value, index = float(found[1]), int(found[2])
        must(index < values.size, f"an index below {values.size}", repr(text), request)
        near = 1e-5 + 1e-5 * abs(highest[rank])
        must(abs(value - highest[rank]) <= near, f"{highest[rank]:f} as number {rank + 1}", repr(text), request)
        must(abs(values[index] - value) <= near, f"the value at {index}, {values[index]:f}", repr(text), request)


@check("classification.count", MUST, _SOURCE, "The tensor is of type BYTES with shape [batch-size, count].", _NEEDS)
def count(session: Session) -> None:
    model, name, _ = _output(session)
    wanted = [1, 1] if model.max_batch_size > 0 else [1]
    shape, classes = _classes(session, _request(session, model, name, 1))
    must(shape == wanted and len(classes) == 1, f"shape {wanted}", shape)


@check(
    "classification.rows", MUST, _SOURCE, "Each row of a batch has its own classes: shape [batch-size, count].", _NEEDS
)
def rows(session: Session) -> None:
    model, name, _ = _output(session)
    if model.max_batch_size < 2:
        raise Skipped("the model takes one row only")
    shape, _ = _classes(session, _request(session, model, name, 1, rows=2))
    must(shape == [2, 1], "shape [2, 1]", shape)


@check(
    "classification.more-than-there-are",
    TRITON,
    OBSERVED,
    "A request for more classes than there are gets all of them.",
    _NEEDS,
)
def more(session: Session) -> None:
    model, name, array = _output(session)
    class_count = array[0].size if model.max_batch_size > 0 else array.size
    shape, _ = _classes(session, _request(session, model, name, class_count + 1))
    must(shape[-1] == class_count, f"{class_count} classes", shape)


def _zero(session: Session) -> InvalidCall:
    model, name, _ = _output(session)
    return InvalidCall(_request(session, model, name, 0), ["classification", "classes", name])


def _text(session: Session) -> InvalidCall:
    model, name, _ = _output(session)
    request = _request(session, model, name, 1)
    request.outputs[0].parameters["classification"].string_param = "2"
    return InvalidCall(request, ["classification", "classes", name])


NONE = refusal(
    "classification.of-none", TRITON, OBSERVED, "classification is 1 or more.", [Code.INVALID_ARGUMENT], _zero, _NEEDS
)
TEXT = refusal(
    "classification.a-string", TRITON, OBSERVED, "classification is an int64.", [Code.INVALID_ARGUMENT], _text, _NEEDS
)
