"""The parameters of a request and of its outputs: reserved ones are checked, unknown ones tolerated as in Triton.

| parameter | type | meaning here |
|---|---|---|
| timeout | int64 or uint64, microseconds | the request is not run later than this; 0 = no limit |
| priority | int64 or uint64 | 1 = the most urgent, 0 = the model's default; ignored where it has no `priority_levels` |
| sequence_id | int64, uint64 or string | checked and ignored: models are stateless |
| sequence_start, sequence_end | bool | the same |
| binary_data_output, headers | bool; string | checked and ignored |
| triton_enable_empty_final_response | bool | on a stream, marks each answer as the final one of its request |
| any other triton_… | | refused: the prefix is reserved |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bf16kit.errors import InvalidRequest, Unsupported
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.wording import quoted

Parameters = Mapping[str, pb.InferParameter]

_INTEGER = ("int64_param", "uint64_param")
_REQUEST: Mapping[str, tuple[str, ...]] = {
    "timeout": _INTEGER,
    "priority": _INTEGER,
    "sequence_id": (*_INTEGER, "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "binary_data_output": ("bool_param",),
    "headers": ("string_param",),
    "triton_enable_empty_final_response": ("bool_param",),
}
_SHARED_MEMORY = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")
_RESERVED_PREFIX = "triton_"


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """What the parameters of a request ask for. ``timeout`` is in seconds; ``priority`` 0 is the model's default."""

    timeout: float | None = None
    priority: int = 0


def check_request(parameters: Parameters) -> RequestParameters:
    """Check a request's parameters. Raises :class:`InvalidRequest` naming the parameter and what was expected."""
    for name, value in parameters.items():
        choice = value.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequest(f"parameter {quoted(name)} has no value")
        allowed = _REQUEST.get(name)
        if allowed is None and name.startswith(_RESERVED_PREFIX):
            raise InvalidRequest(f"parameter {quoted(name)} is unknown, and names starting with 'triton_' are reserved")
        if allowed is not None and choice not in allowed:
            raise InvalidRequest(f"parameter {name!r} came as {choice}, expected {' or '.join(allowed)}")
    return RequestParameters(_natural("timeout", parameters) / 1e6 or None, _natural("priority", parameters))


def wants_final_mark(parameters: Parameters) -> bool:
    """Whether the caller of a stream asked to see which answer is the last of its request."""
    name = "triton_enable_empty_final_response"
    return name in parameters and parameters[name].bool_param


def check_input(name: str, parameters: Parameters) -> None:
    """Refuse an input that lies in shared memory; other parameters mean nothing here and are tolerated."""
    for key in _SHARED_MEMORY:
        if key in parameters:
            raise Unsupported(f"input {name!r} lies in shared memory, which is not supported; send it in the request")


def output_datatype(name: str, native: str, parameters: Parameters) -> str:
    """The datatype in which to answer output ``name``: its own, or the ``datatype`` asked for (BF16 for FP32)."""
    for key in (*_SHARED_MEMORY, "classification"):
        if key in parameters:
            raise Unsupported(f"output {name!r} was asked for with {key!r}, which is not supported; leave it out")
    if "datatype" not in parameters:
        return native
    value = parameters["datatype"]
    if value.WhichOneof("parameter_choice") != "string_param":
        raise InvalidRequest(f"parameter 'datatype' of output {name!r} must be a string, for example 'BF16'")
    asked = value.string_param
    if asked == native or (asked == "BF16" and native == "FP32"):
        return asked
    also = " or BF16" if native == "FP32" else ""
    raise InvalidRequest(f"output {name!r} was asked for as {quoted(asked)}, but can be had as {native}{also}")


def _natural(name: str, parameters: Parameters) -> int:
    """The number in a parameter, 0 where it is not there."""
    number = _integer(parameters[name]) if name in parameters else 0
    if number < 0:
        raise InvalidRequest(f"parameter {name!r} is {number}, expected 0 or more")
    return number


def _integer(value: pb.InferParameter) -> int:
    return value.int64_param if value.WhichOneof("parameter_choice") == "int64_param" else value.uint64_param
