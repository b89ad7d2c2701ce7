"""Checks that an inference response is well formed, by the protocol and by the model's metadata."""

from __future__ import annotations

from collections.abc import Iterable

from oip_conformance.models import Model
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.suite import Failed, must
from oip_conformance.wire import Array, Malformed, decode, read_contents


def outputs(model: Model, request: pb.ModelInferRequest, response: pb.ModelInferResponse) -> dict[str, Array]:
    """Return the response's outputs by name. Raises :class:`Failed`."""
    must(response.model_name == model.name, f"model_name {model.name!r}", repr(response.model_name), request)
    promised = {spec.name: spec for spec in model.outputs}
    raw = response.raw_output_contents
    if raw:
        must(len(raw) == len(response.outputs), f"a raw content for each of {len(response.outputs)} outputs", len(raw))
    found: dict[str, Array] = {}
    for index, output in enumerate(response.outputs):
        must(output.name not in found, "each output once", f"{output.name!r} twice", request)
        must(output.name in promised, f"outputs among {sorted(promised)}", repr(output.name), request)
        found[output.name] = read(output, raw[index] if raw else None, request)
        spec = promised[output.name]
        must(output.datatype == spec.datatype, f"{output.name!r} as {spec.datatype}", output.datatype, request)
        must(
            fits(output.shape, spec.shape), f"{output.name!r} of shape {list(spec.shape)}", list(output.shape), request
        )
    return found


def read(output: pb.ModelInferResponse.InferOutputTensor, raw: bytes | None, request: object) -> Array:
    """Read one output, from raw or typed contents; Failed if it has both."""
    shape = list(output.shape)
    must(min(shape, default=0) >= 0, f"a shape of {output.name!r} without negative sizes", shape, request)
    filled = bool(output.contents.ListFields())  # an empty message beside raw contents is allowed
    must(
        not (filled and raw is not None), "no contents beside raw_output_contents", f"both for {output.name!r}", request
    )
    try:
        if raw is not None:
            return decode(output.datatype, shape, raw)
        return read_contents(output.datatype, shape, output.contents)
    except Malformed as error:
        raise Failed(f"{output.name!r} to hold {output.datatype} of shape {shape}", error, request) from None


def fits(shape: Iterable[int], promised: Iterable[int]) -> bool:
    """Return whether the metadata allows a shape: −1 stands for any size."""
    have, allowed = list(shape), list(promised)
    return len(have) == len(allowed) and all(a in (-1, h) for h, a in zip(have, allowed, strict=True))
