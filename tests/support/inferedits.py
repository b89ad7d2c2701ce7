"""Edits of a ``ModelInferRequest`` that know the protocol: each makes one part invalid, huge or inconsistent.

Some leave the request valid. The results are valid protobuf; ``wireedits`` edits the bytes.
"""

import math
from collections.abc import Callable
from random import Random
from typing import Any

from bf16kit.numerics.tensors import BY_OIP
from bf16kit.protocol import inference_pb2 as pb

Message = pb.ModelInferRequest
Edit = Callable[[Random, Message], None]
NUMBERS = (
    -(2**63), -(2**31), -1, 0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 255, 256, 65_536, 2**24, 2**31 - 1, 2**31, 2**32,
    2**32 + 1, 2**61, 2**62, 2**63 - 1,
)  # fmt: skip
_REALS = (0.0, -0.0, 1.5, -1.0, 5e-324, 1e-45, 3.4e38, 1e308, math.inf, -math.inf, math.nan)
TEXTS = (
    "", "x", "ids", "y", "mlp", "lookup", "kinds", " mlp", "mlp ", "MLP", "mlp\0", "mlp/1", "../mlp", "/etc/passwd",
    "*", "%s%n%x", "{name}", "${x}", "'\"`", "<script>alert(1)</script>", "\r\ninjected: 1", "\x1b[2J", "\u202eplm",
    "\ufeffmlp", "\U0001f600" * 40, "\u0661", "é" * 300, "n" * 5_000, "\U000e0001" * 300, "\0" * 2_000,
)  # fmt: skip
_VERSIONS = (
    "1", "0", "2", "-1", "+1", "01", "1.0", "1e0", "0x1", "1 ", " 1", "١", "９", "²", "9" * 18, "9" * 19, "9" * 5_000,
)  # fmt: skip
_DATATYPES = (*BY_OIP, "fp32", "FP8", "INT4", "TYPE_FP32", "STRING", "float32", "", " FP32", "FP32\0")
_PARAMETERS = (
    "timeout", "priority", "sequence_id", "sequence_start", "sequence_end", "binary_data_output", "headers",
    "triton_enable_empty_final_response", "triton_", "triton_unknown", "binary_data", "binary_data_size",
    "classification", "datatype", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "mine", "",
)  # fmt: skip
_SYMBOLS = (
    "inference.proto", "inference.GRPCInferenceService", "inference.ModelInferRequest", "inference.DataType",
    "inference.DataType.TYPE_FP32", "inference.GRPCInferenceService.ModelInfer", "inference.ModelInferRequest.id",
    ".inference.ModelInferRequest", "grpc.health.v1.Health", "inference",
)  # fmt: skip
_KNOWN = ("mlp", "lookup", "kinds", "ids", "rows", "y", "1", "")
_CONTENTS = tuple(pb.InferTensorContents.DESCRIPTOR.fields_by_name)


def text(rng: Random) -> str:
    """Return one of :data:`TEXTS`, or rarely (1 in 500) a text of 2^16 to 2^20 characters."""
    if rng.random() < 0.002:
        return rng.choice(("n", "\0", "é", "\U000e0001")) * (1 << rng.choice((16, 18, 20)))
    return rng.choice(TEXTS)


def value(rng: Random, field: Any) -> Any:
    """Return a value for a field that is no message."""
    if field.cpp_type == field.CPPTYPE_STRING:
        chosen = rng.choice((text(rng), rng.choice(rng.choice((_SYMBOLS, _KNOWN, _VERSIONS, _DATATYPES)))))
        return chosen.encode() if field.type == field.TYPE_BYTES else chosen
    if field.cpp_type == field.CPPTYPE_BOOL:
        return rng.random() < 0.5
    bits = 32 if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32) else 64
    signed = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64)
    return rng.choice(NUMBERS) % 2**bits - (2 ** (bits - 1) if signed else 0)


def _any_input(rng: Random, message: Message) -> Any:
    return rng.choice(message.inputs) if message.inputs else message.inputs.add()


def _field(rng: Random, message: Message) -> None:
    """Set, clear or add to any field of the message, of an input or of an output."""
    owner: Any = rng.choice([message, *message.inputs, *message.outputs])
    field = rng.choice(owner.DESCRIPTOR.fields)
    if field.message_type is not None or rng.random() < 0.05:
        owner.ClearField(field.name)
    elif field.is_repeated:
        getattr(owner, field.name).append(value(rng, field))
    else:
        setattr(owner, field.name, value(rng, field))


def _size(rng: Random, message: Message) -> None:
    shape = _any_input(rng, message).shape
    if shape:
        shape[rng.randrange(len(shape))] = rng.choice(NUMBERS)


def _shape(rng: Random, message: Message) -> None:
    """Set another rank, or sizes whose product is zero, huge, or zero modulo 2^64."""
    rank = rng.choice((0, 1, 2, 3, 8, 9, 1000))
    sizes = rng.choice((NUMBERS, (2**32, 2**32), (2**31, 2**33, 1), (2**62, 4), (0, 2**63 - 1), (0, 2**20), (1, 2)))
    _any_input(rng, message).shape[:] = [rng.choice(sizes) for _ in range(rank)]


def _raw_length(rng: Random, message: Message) -> None:
    raw = message.raw_input_contents
    if raw:
        at, data = rng.randrange(len(raw)), raw[-1]
        raw[at] = rng.choice((b"", data[:-1], data + b"\0", data * 2, data[: len(data) // 2], rng.randbytes(4096)))


def _raw_count(rng: Random, message: Message) -> None:
    raw = message.raw_input_contents
    rng.choice((lambda: raw.append(b""), lambda: raw.extend([b""] * 1000), raw.clear, lambda: raw.append(bytes(64))))()


def _data(rng: Random, message: Message) -> None:
    """Set any bits: NaNs of all kinds, infinities, denormals, huge indices, invalid strings."""
    raw = message.raw_input_contents
    if raw:
        at = rng.randrange(len(raw))
        floats = (0x7F800000, 0xFF800000, 0x7FC00001, 0x7FA00001, 0x00000001, 0x80000000)
        kinds = [number.to_bytes(4, "little") for number in floats]
        pattern = rng.choice((*kinds, b"\xff", rng.randbytes(8)))
        raw[at] = (pattern * len(raw[at]))[: len(raw[at])]


def _contents(rng: Random, message: Message) -> None:
    """Add values to a field of the contents: beside raw contents, of another type, or too many."""
    name = rng.choice(_CONTENTS)
    values = getattr(_any_input(rng, message).contents, name)
    for _ in range(rng.choice((1, 2, 16, 100))):
        if name == "bool_contents":
            values.append(rng.random() < 0.5)
        elif name == "bytes_contents":
            values.append(rng.randbytes(rng.randrange(9)))
        elif name.startswith("fp"):
            values.append(rng.choice(_REALS))
        else:
            bits = 32 if name in ("int_contents", "uint_contents") else 64
            number = rng.choice(NUMBERS) % 2**bits
            values.append(number if name.startswith("uint") else number - 2 ** (bits - 1))


def _parameter(rng: Random, message: Message) -> None:
    """Set a parameter of the request, of an input or of an output to a value of any kind."""
    output = (message.outputs or [message.outputs.add(name="y")])[0] if rng.random() < 0.25 else message
    owner: Any = _any_input(rng, message) if rng.random() < 0.25 else output
    parameter = owner.parameters[rng.choice((rng.choice(_PARAMETERS), rng.choice(("timeout", "priority")), text(rng)))]
    field = rng.choice(parameter.DESCRIPTOR.fields)
    setattr(parameter, field.name, rng.choice(_REALS) if "double" in field.name else value(rng, field))


def _twice(rng: Random, message: Message) -> None:
    """Repeat an input, with or without its contents."""
    if message.inputs:
        at = rng.randrange(len(message.inputs))
        message.inputs.add().CopyFrom(message.inputs[at])
        if message.raw_input_contents and rng.random() < 0.7:
            message.raw_input_contents.append(message.raw_input_contents[at % len(message.raw_input_contents)])


def _outputs(rng: Random, message: Message) -> None:
    for _ in range(rng.choice((1, 1, 2, 3, 300))):
        message.outputs.add(name=rng.choice((text(rng), "y", "rows")))


def _missing(rng: Random, message: Message) -> None:
    if message.inputs:
        at = rng.randrange(len(message.inputs))
        del message.inputs[at]
        if at < len(message.raw_input_contents) and rng.random() < 0.7:
            del message.raw_input_contents[at]


EDITS: tuple[Edit, ...] = (
    _field, _field, _field, _field, _field, _size, _size, _shape, _raw_length, _raw_count, _data, _data, _contents,
    _parameter, _parameter, _parameter, _outputs, _twice, _missing,
)  # fmt: skip


def edit(rng: Random, message: Message) -> None:
    """Apply one to three edits in place."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(EDITS)(rng, message)
