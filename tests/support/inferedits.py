"""Edits of a ``ModelInferRequest`` that know the protocol: each makes one part invalid, huge or inconsistent.

Some leave the request valid. The results are valid protobuf; ``wireedits`` edits the bytes.
"""

from __future__ import annotations

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
    "1",
    "0",
    "2",
    "-1",
    "+1",
    "01",
    "1.0",
    "1e0",
    "0x1",
    "1 ",
    " 1",
    "١",
    "９",
    "²",
    "9" * 18,
    "9" * 19,
    "9" * 5_000,
)
_DATATYPES = (*BY_OIP, "fp32", "FP8", "INT4", "TYPE_FP32", "STRING", "float32", "", " FP32", "FP32\0")
_PARAMETERS = (
    "timeout", "priority", "sequence_id", "sequence_start", "sequence_end", "binary_data_output", "headers",
    "triton_enable_empty_final_response", "triton_", "triton_unknown", "binary_data", "binary_data_size",
    "classification", "datatype", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "mine", "",
)  # fmt: skip
_CONTENTS = tuple(pb.InferTensorContents.DESCRIPTOR.fields_by_name)


def text(rng: Random) -> str:
    """Return one of :data:`TEXTS`, or rarely (1 in 500) a text of 2^16 to 2^20 characters."""
    if rng.random() < 0.002:
        return rng.choice(("n", "\0", "é", "\U000e0001")) * (1 << rng.choice((16, 18, 20)))
    return rng.choice(TEXTS)


def _any_input(rng: Random, message: Message) -> Any:
    return rng.choice(message.inputs) if message.inputs else message.inputs.add()


def _model(rng: Random, message: Message) -> None:
    message.model_name = text(rng)


def _version(rng: Random, message: Message) -> None:
    message.model_version = rng.choice((rng.choice(_VERSIONS), text(rng)))


def _id(rng: Random, message: Message) -> None:
    message.id = text(rng)


def _name(rng: Random, message: Message) -> None:
    _any_input(rng, message).name = text(rng)


def _datatype(rng: Random, message: Message) -> None:
    _any_input(rng, message).datatype = rng.choice((rng.choice(_DATATYPES), text(rng)))


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
        kinds = (
            b"\xff",
            b"\0\0\x80\x7f",
            b"\0\0\x80\xff",
            b"\x01\0\xc0\x7f",
            b"\x01\0\xa0\x7f",
            b"\x01\0\0\0",
            b"\0\0\0\x80",
        )
        pattern = rng.choice((*kinds, rng.randbytes(8)))
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


def _parameter(rng: Random, target: Any) -> None:
    value = target[rng.choice((rng.choice(_PARAMETERS), text(rng)))]
    kind = rng.randrange(6)
    if kind == 0:
        value.bool_param = rng.random() < 0.5
    elif kind == 1:
        value.int64_param = rng.choice(NUMBERS)
    elif kind == 2:
        value.string_param = text(rng)
    elif kind == 3:
        value.double_param = rng.choice(_REALS)
    elif kind == 4:
        value.uint64_param = rng.choice((*(abs(n) for n in NUMBERS), 2**64 - 1))


def _parameters(rng: Random, message: Message) -> None:
    where = rng.randrange(4)
    for _ in range(rng.choice((1, 1, 2, 5))):
        if where == 0:
            _parameter(rng, _any_input(rng, message).parameters)
        elif where == 1:
            _parameter(rng, (message.outputs or [message.outputs.add(name="y")])[0].parameters)
        else:
            _parameter(rng, message.parameters)


def _known_parameter(rng: Random, message: Message) -> None:
    """Set a parameter that the server reads to a number that it must accept or reject."""
    value = message.parameters[rng.choice(("timeout", "priority"))]
    if rng.random() < 0.5:
        value.int64_param = rng.choice(NUMBERS)
    else:
        value.uint64_param = rng.choice((0, 1, 1000, 10**6, 2**63, 2**64 - 1))


def _outputs(rng: Random, message: Message) -> None:
    for _ in range(rng.choice((1, 1, 2, 3, 300))):
        message.outputs.add(name=rng.choice((text(rng), "y", "rows")))


def _twice(rng: Random, message: Message) -> None:
    """Repeat an input, with or without its contents."""
    if message.inputs:
        at = rng.randrange(len(message.inputs))
        message.inputs.add().CopyFrom(message.inputs[at])
        if message.raw_input_contents and rng.random() < 0.7:
            message.raw_input_contents.append(message.raw_input_contents[at % len(message.raw_input_contents)])


def _missing(rng: Random, message: Message) -> None:
    if message.inputs:
        at = rng.randrange(len(message.inputs))
        del message.inputs[at]
        if at < len(message.raw_input_contents) and rng.random() < 0.7:
            del message.raw_input_contents[at]


def _many(rng: Random, message: Message) -> None:
    """Add a thousand empty inputs or outputs."""
    target = rng.choice((message.inputs, message.outputs))
    for _ in range(1000):
        target.add()


def _nothing(rng: Random, message: Message) -> None:
    message.Clear()


EDITS: tuple[Edit, ...] = (
    _model, _version, _id, _name, _datatype, _size, _size, _shape, _raw_length, _raw_count, _data, _data, _contents,
    _parameters, _parameters, _known_parameter, _outputs, _twice, _missing,
)  # fmt: skip
_RARE: tuple[Edit, ...] = (_many, _nothing)


def edit(rng: Random, message: Message) -> None:
    """Apply one to three edits in place."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(_RARE if rng.random() < 0.01 else EDITS)(rng, message)
