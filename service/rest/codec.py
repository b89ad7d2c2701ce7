"""Bodies of REST requests to the protocol's messages, and responses back, in JSON with the binary tensor extension.

Only what JSON adds is checked here. The message is then checked as one that came by gRPC.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from bf16kit.messages.errors import InvalidRequest
from bf16kit.messages.wording import quoted
from bf16kit.numerics.tensors import BY_OIP
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.wire.limits import Reserve
from bf16kit.service.wire.tensors import decode_raw, element_count, encode_raw

#: The most values in the JSON of a request or response: other threads wait while it is read or written.
MAX_VALUES = 1 << 18
_VALUE_BYTES = 64  # bytes in memory of an empty list; numbers take less
_TEXT_FACTOR = 4  # bytes in memory of a character, at most
_MAX_TENSORS = 1 << 10
_MAX_RANK = 64
_DIGITS = re.compile(r"[0-9]{1,15}")
_INT64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Text = Annotated[str, Field(max_length=1 << 16)]
_Parameters = dict[_Text, bool | _INT64 | float | str]
_CHOICES = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
#: The types in JSON of a datatype's values. FP16 and BF16 are binary only.
_TYPES: dict[str, set[type]] = {
    "BOOL": {bool},
    "BYTES": {str},
    **{f"{sign}INT{bits}": {int} for sign in ("", "U") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": {int, float} for bits in (32, 64)},
}


class _Named(BaseModel):
    model_config = ConfigDict(strict=True)

    name: _Text
    parameters: _Parameters | None = None


class _Input(_Named):
    datatype: _Text
    shape: list[_INT64] = Field(max_length=_MAX_RANK)
    data: list[Any] | None = None


class _Body(BaseModel):
    """The JSON of a request. Other keys are ignored, as in Triton."""

    model_config = ConfigDict(strict=True)

    id: _Text | None = None
    parameters: _Parameters | None = None
    inputs: list[_Input] = Field(max_length=_MAX_TENSORS)
    outputs: list[_Named] | None = Field(default=None, max_length=_MAX_TENSORS)


def decode(
    body: bytearray, json_length: str | None, model: str, version: str, reserve: Reserve
) -> tuple[pb.ModelInferRequest, Callable[[str], bool]]:
    """Return the message that asks ``model`` for the same as ``body``, and whether an output is wanted in binary.

    ``json_length`` is the text of ``Inference-Header-Content-Length``; None: all of the body is JSON. ``reserve`` is
    called with the bytes that the request takes, before they are taken. Raises InvalidRequest.
    """
    at, end = _json_end(json_length, len(body)), len(body)
    asked = _read_json(body[:at], lambda nbytes: reserve(end + nbytes))
    given = asked.parameters or {}
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=asked.id or "")
    _fill(message.parameters, given)
    for each in asked.inputs:
        _fill(message.inputs.add(name=each.name, datatype=each.datatype, shape=each.shape).parameters, each.parameters)
        size = (each.parameters or {}).get("binary_data_size")
        if size is not None:
            if type(size) is not int or not 0 <= size <= end - at or each.data is not None:
                raise InvalidRequest(
                    f"input {quoted(each.name)} has binary_data_size {size!r}, expected at most {end - at}, which is"
                    " left of the body, and no data"
                )
            message.raw_input_contents.append(bytes(memoryview(body)[at : at + size]))
            at += size
        elif each.data is not None:
            message.raw_input_contents.append(_raw(each, each.data))
        elif "shared_memory_region" not in (each.parameters or {}):
            raise InvalidRequest(f"input {quoted(each.name)} has neither data nor the parameter binary_data_size")
    if at != end:
        raise InvalidRequest(f"the body has {end - at} bytes more than its JSON and each binary_data_size say")
    others = given.get("binary_data_output") is True
    named: dict[str, bool] = {}
    for wanted in asked.outputs or ():
        _fill(message.outputs.add(name=wanted.name).parameters, wanted.parameters)
        named[wanted.name] = (wanted.parameters or {}).get("binary_data", others) is True
    return message, lambda name: named.get(name, others)


def _json_end(json_length: str | None, size: int) -> int:
    """Return where the JSON of a body of ``size`` bytes ends."""
    if json_length is None:
        return size
    if _DIGITS.fullmatch(json_length) and int(json_length) <= size:
        return int(json_length)
    raise InvalidRequest(
        f"Inference-Header-Content-Length is {quoted(json_length)}, expected the number of bytes of JSON at the start"
        f" of the body of {size}"
    )


def _read_json(text: bytearray, reserve: Reserve) -> _Body:
    values = sum(map(text.count, b",[{"))
    if values > MAX_VALUES:
        raise InvalidRequest(
            f"the JSON has about {values} values, expected at most {MAX_VALUES}; send tensors in binary"
        )
    reserve(len(text) * _TEXT_FACTOR + values * _VALUE_BYTES)
    try:
        return _Body.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"the request's JSON{where and f', {quoted(where)}'}: {first['msg']}") from None


def encode(response: pb.ModelInferResponse, is_binary: Callable[[str], bool]) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON if binary outputs follow. Raises InvalidRequest."""
    head: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        head["id"] = response.id
    head["parameters"], head["outputs"] = _given(response.parameters), []
    tail: list[bytes] = []
    values = 0
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        parameters = _given(output.parameters)
        described = {"name": output.name, "datatype": output.datatype, "shape": output.shape[:]}
        if is_binary(output.name):
            tail.append(raw)
            parameters["binary_data_size"] = len(raw)
        elif "shared_memory_region" not in parameters:
            values += element_count(output.name, output.shape)
            described["data"] = _values(output, raw, values)
        head["outputs"].append({**described, "parameters": parameters} if parameters else described)
    text = to_json(head, inf_nan_mode="constants")
    return b"".join((text, *tail)), len(text) if tail else None


def _fill(parameters: Any, given: _Parameters | None) -> None:
    for name, value in (given or {}).items():
        setattr(parameters[name], _CHOICES[type(value)], value)


def _given(parameters: Any) -> dict[str, Any]:
    return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}


def _values(output: pb.ModelInferResponse.InferOutputTensor, raw: bytes, total: int) -> list[Any]:
    """Return the values of an output, in order. ``total``: of all outputs so far."""
    if output.datatype not in _TYPES or total > MAX_VALUES:
        raise InvalidRequest(
            f"output {output.name!r} is {output.datatype} of shape {output.shape[:]}; JSON holds neither FP16 nor BF16,"
            f" and at most {MAX_VALUES} values: request it with the parameter binary_data"
        )
    array = decode_raw(output.name, BY_OIP[output.datatype], tuple(output.shape), raw)
    values: list[Any] = array.ravel().tolist()
    return values


def _raw(tensor: _Input, values: list[Any]) -> bytes:
    """Return the bytes of an input whose values are nested in lists, or flat."""
    name = quoted(tensor.name)
    if tensor.datatype not in _TYPES:
        raise InvalidRequest(
            f"input {name} has datatype {quoted(tensor.datatype)}, expected one that JSON holds ({', '.join(_TYPES)});"
            " FP16 and BF16 are sent in binary"
        )
    while values and {*map(type, values)} == {list}:
        values = list(chain.from_iterable(values))
    wrong = {*map(type, values)} - _TYPES[tensor.datatype]
    if wrong:
        raise InvalidRequest(f"input {name} is {tensor.datatype} and holds a value of type {wrong.pop().__name__}")
    if len(values) != (count := element_count(tensor.name, tensor.shape)):
        raise InvalidRequest(
            f"input {name} has {len(values)} elements in data, expected {count} for shape {tensor.shape}"
        )
    dtype = BY_OIP[tensor.datatype]
    try:
        with np.errstate(over="raise"):
            return encode_raw(dtype, np.array(values, dtype.numpy))
    except ArithmeticError:
        raise InvalidRequest(f"input {name} holds a value outside the range of {tensor.datatype}") from None
