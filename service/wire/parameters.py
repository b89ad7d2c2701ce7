"""The parameters of a request and of its outputs: reserved ones are checked, unknown ones tolerated as in Triton.

| parameter | type | meaning here |
|---|---|---|
| timeout | int64 or uint64, microseconds | the request is not run later than this; 0 = no limit |
| priority | int64 or uint64 | 0 or more; ignored: all requests of a model wait in one queue |
| sequence_id | int64, uint64 or string | refused unless 0 or empty: models keep no state between requests |
| sequence_start, sequence_end | bool | refused unless false |
| binary_data_output, headers | bool; string | checked and ignored |
| triton_enable_empty_final_response | bool | on a stream, marks each answer as the final one of its request |
| any other triton_… | | refused: the prefix is reserved |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from bf16kit.messages.errors import InvalidRequest
from bf16kit.messages.wording import quoted
from bf16kit.protocol import inference_pb2 as pb

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
_REGION, _OFFSET, _BYTE_SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
_CLASSES = "classification"
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
_RESERVED_PREFIX = "triton_"


class RegionPlace(NamedTuple):
    """Bytes of a region of shared memory as a request names them, not checked yet."""

    region: str
    offset: int
    byte_size: int


def check_request(parameters: Parameters) -> float | None:
    """Check a request's parameters; return its timeout in seconds, if any. Raises InvalidRequest with the name."""
    for name, value in parameters.items():
        choice = value.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequest(f"parameter {quoted(name)} has no value")
        allowed = _REQUEST.get(name)
        if allowed is None and name.startswith(_RESERVED_PREFIX):
            raise InvalidRequest(f"parameter {quoted(name)} is unknown, and names starting with 'triton_' are reserved")
        if allowed is not None and choice not in allowed:
            raise InvalidRequest(f"parameter {name!r} came as {choice}, expected {' or '.join(allowed)}")
        if name in _SEQUENCE and getattr(value, choice):
            raise InvalidRequest(
                f"parameter {name!r}: models of this server keep no state between requests; send independent"
                " requests, without sequence parameters"
            )
    _natural("priority", parameters)
    return _natural("timeout", parameters) / 1e6 or None


def wants_final_mark(parameters: Parameters) -> bool:
    """Return whether the client of a stream wants the last response to each request marked."""
    name = "triton_enable_empty_final_response"
    return name in parameters and parameters[name].bool_param


def region_place(what: str, parameters: Parameters) -> RegionPlace | None:
    """Return the place of ``what`` (an input or output) in shared memory; None: it is in the message.

    Raises InvalidRequest naming the parameter.
    """
    if _REGION not in parameters:
        stray = next((key for key in (_OFFSET, _BYTE_SIZE) if key in parameters), None)
        if stray is not None:
            raise InvalidRequest(f"{what} has {stray!r} without {_REGION!r}")
        return None
    region = _expected(what, _REGION, parameters, "string_param").string_param
    if _BYTE_SIZE not in parameters:
        raise InvalidRequest(f"{what} has {_REGION!r} without {_BYTE_SIZE!r}")
    byte_size = _integer(_expected(what, _BYTE_SIZE, parameters, *_INTEGER))
    offset = _integer(_expected(what, _OFFSET, parameters, *_INTEGER)) if _OFFSET in parameters else 0
    return RegionPlace(region, offset, byte_size)


def output_datatype(name: str, native: str, parameters: Parameters) -> str:
    """Return the datatype of output ``name``: its own, or that requested, which is BF16 or FP16 for FP32.

    Raises InvalidRequest for any other.
    """
    if "datatype" not in parameters:
        return native
    requested = _expected(f"output {name!r}", "datatype", parameters, "string_param").string_param
    if requested == native or (requested in ("BF16", "FP16") and native == "FP32"):
        return requested
    also = ", BF16 or FP16" if native == "FP32" else ""
    raise InvalidRequest(f"output {name!r} was requested as {quoted(requested)}, but is available as {native}{also}")


def class_count(name: str, parameters: Parameters) -> int:
    """Return how many classes output ``name`` has in place of its values; 0: none. Raises InvalidRequest."""
    if _CLASSES not in parameters:
        return 0
    what = f"output {name!r}"
    count = _integer(_expected(what, _CLASSES, parameters, *_INTEGER))
    if count <= 0:
        raise InvalidRequest(f"{what} was requested with {count} classes, expected 1 or more")
    for key in (_REGION, "datatype"):
        if key in parameters:
            raise InvalidRequest(f"{what} was requested with {key!r} beside {_CLASSES!r}; leave one of them out")
    return count


def _expected(what: str, key: str, parameters: Parameters, *choices: str) -> pb.InferParameter:
    """Return the parameter ``key`` of ``what``. Raises InvalidRequest unless it has one of these types."""
    value = parameters[key]
    choice = value.WhichOneof("parameter_choice")
    if choice not in choices:
        raise InvalidRequest(f"parameter {key!r} of {what} came as {choice}, expected {' or '.join(choices)}")
    return value


def _natural(name: str, parameters: Parameters) -> int:
    """Return the number in a parameter, 0 if it is absent. Raises InvalidRequest if it is negative."""
    number = _integer(parameters[name]) if name in parameters else 0
    if number < 0:
        raise InvalidRequest(f"parameter {name!r} is {number}, expected 0 or more")
    return number


def _integer(value: pb.InferParameter) -> int:
    return value.int64_param if value.WhichOneof("parameter_choice") == "int64_param" else value.uint64_param
