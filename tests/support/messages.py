"""Messages that attack every RPC, generated from a number: the same number gives the same attempt.

``python tests/support/messages.py NUMBER`` prints one. The messages are for the models of :func:`write_models`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from artifacts import write_kinds, write_lookup, write_mlp, write_words
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from inferedits import edit, text, value
from wireedits import damaged

from bf16kit.numerics.rounding import to_bf16
from bf16kit.numerics.tensors import BY_NAME, BY_OIP, Array
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.grpc.handlers import SERVICE
from bf16kit.service.wire.tensors import CONTENTS_FIELD, encode_raw

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
_INFERENCE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
INFER, STREAM = f"/{SERVICE}/ModelInfer", f"/{SERVICE}/ModelStreamInfer"
WATCH, REFLECTION = f"/{_HEALTH.full_name}/Watch", f"/{_REFLECTION.full_name}/ServerReflectionInfo"
#: Every RPC except the two that run models: path → request class.
_ASKING: Mapping[str, Any] = {
    **{f"/{SERVICE}/{m.name}": GetMessageClass(m.input_type) for m in _INFERENCE.methods if "Infer" not in m.name},
    f"/{_HEALTH.full_name}/Check": health_pb2.HealthCheckRequest,
    WATCH: health_pb2.HealthCheckRequest,
    REFLECTION: reflection_pb2.ServerReflectionRequest,
}


_STREAMS = (STREAM, REFLECTION)


@dataclass(frozen=True)
class Attempt:
    """A call and its requests, serialized."""

    number: int
    path: str
    messages: tuple[bytes, ...]
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Valid:
    """A valid request, which must get a response. ``feeds`` are the inputs that its model must receive."""

    model: str
    feeds: Mapping[str, Array]
    message: pb.ModelInferRequest


MODELS = ("mlp", "lookup", "kinds", "words")


def write_models(repository: Path) -> None:
    """Write four models.

    ``mlp`` has fp32 inputs, ``lookup`` int64 inputs that may be out of range, ``words`` strings. ``kinds`` returns its
    inputs, of all datatypes except strings. Drift sampling measures the first request to each model at once, and then
    at most one per second.
    """
    for model, write in zip(MODELS, (write_mlp, write_lookup, write_kinds, write_words), strict=True):
        write(repository / model / "1")
        (repository / model / "serving.yaml").write_text("shadow: {rate: 1, max_per_second: 1}\n", "utf-8")


def attempt(number: int) -> Attempt:
    rng = Random(number)
    chance = rng.random()
    if chance < 0.6:
        return Attempt(number, INFER, (_hostile(rng),))
    if chance < 0.75:
        mark = (("triton_grpc_error", rng.choice(("true", "false"))),) if rng.random() < 0.3 else ()
        return Attempt(number, STREAM, tuple(_hostile(rng) for _ in range(rng.randint(0, 6))), mark)
    path = rng.choice(tuple(_ASKING))
    count = rng.randint(0, 4) if path in _STREAMS else 1
    return Attempt(number, path, tuple(_asking(rng, _ASKING[path]) for _ in range(count)))


def valid(number: int) -> Valid:
    """Return the valid request of this number, with raw or typed contents, for one of the models."""
    rng = Random(-1 - number)
    model = rng.choice(("mlp", "mlp", "lookup", "kinds", "words"))
    feeds = _feeds(model, np.random.default_rng(number), rng.randint(1, 4))
    dtype = rng.choice(("FP32", "BF16", "FP16")) if model == "mlp" else ""
    if dtype:  # widening is exact: the model gets what was sent
        feeds = {"x": feeds["x"].astype(BY_OIP[dtype].numpy)}
    return Valid(model, feeds, _message(model, feeds, typed=rng.random() < 0.3))


def _hostile(rng: Random) -> bytes:
    message = valid(rng.getrandbits(32)).message
    if rng.random() < 0.75:
        edit(rng, message)
    data = message.SerializeToString()
    return damaged(rng, data) if rng.random() < 0.3 else data


def _asking(rng: Random, kind: Any) -> bytes:
    message = kind()
    _fill(rng, message)
    data: bytes = message.SerializeToString()
    return damaged(rng, data) if rng.random() < 0.4 else data


def _fill(rng: Random, message: Any) -> None:
    """Set some of the fields of any message to random values of their types."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.4:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(rng.randint(1, 3)):
                _fill(rng, getattr(message, field.name)[text(rng)])
        elif field.message_type is not None:
            _fill(rng, getattr(message, field.name))
        elif field.is_repeated:
            getattr(message, field.name).extend(value(rng, field) for _ in range(rng.randint(1, 3)))
        else:
            setattr(message, field.name, value(rng, field))


def _feeds(model: str, rng: np.random.Generator, rows: int) -> dict[str, Array]:
    if model == "mlp":
        return {"x": to_bf16(rng.standard_normal((rows, 16), np.float32)).astype(np.float16).astype(np.float32)}
    if model == "lookup":
        return {"ids": rng.integers(0, 10, (rows, int(rng.integers(1, 5))))}
    names = ("BYTES", "FP32") if model == "words" else [name for name in BY_OIP if name != "BYTES"]
    return {name: _of(BY_OIP[name].name, rng, rows) for name in names}


def _of(name: str, rng: np.random.Generator, rows: int) -> Array:
    numpy = BY_NAME[name].numpy
    if name == "bool":
        return rng.integers(0, 2, (rows, 2)).astype(np.bool_)
    if name == "string":
        return np.array([[str(rng.choice(("", "a", "é", "bf16")))] * 2 for _ in range(rows)], np.object_)
    if np.issubdtype(numpy, np.integer):
        limits = np.iinfo(numpy)
        return rng.integers(limits.min, limits.max, (rows, 2), numpy, endpoint=True)
    return rng.standard_normal((rows, 2)).astype(numpy)


def _message(model: str, feeds: Mapping[str, Array], *, typed: bool) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model)
    typed = typed and all(BY_NAME[_named(array)].oip in CONTENTS_FIELD for array in feeds.values())
    for name, array in feeds.items():
        dtype = BY_NAME[_named(array)]
        tensor = message.inputs.add(name=name, datatype=dtype.oip, shape=array.shape)
        if not typed:
            message.raw_input_contents.append(encode_raw(dtype, array))
        else:
            values = [v.encode() if isinstance(v, str) else v for v in array.ravel().tolist()]
            getattr(tensor.contents, CONTENTS_FIELD[dtype.oip]).extend(values)
    return message


def _named(array: Array) -> str:
    return "string" if array.dtype == np.object_ else array.dtype.name


if __name__ == "__main__":
    shown = attempt(int(sys.argv[1]))
    sys.stdout.write(f"{shown.path} {shown.metadata}\n" + "".join(f"{data.hex()}\n" for data in shown.messages))
