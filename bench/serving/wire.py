"""Requests as bytes: what clients send is serialised before the clock starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from bf16kit.numerics.tensors import BY_NAME
from bf16kit.protocol import inference_pb2 as pb

SERVICE = "inference.GRPCInferenceService"
INFER = f"/{SERVICE}/ModelInfer"
SERVER_READY = f"/{SERVICE}/ServerReady"
MODEL_READY = f"/{SERVICE}/ModelReady"


def infer_request(model: str, feeds: Mapping[str, NDArray[Any]]) -> bytes:
    """A serialised ModelInferRequest for the newest version of ``model``, asking for all outputs."""
    request = pb.ModelInferRequest(model_name=model)
    for name, array in feeds.items():
        request.inputs.add(name=name, datatype=BY_NAME[array.dtype.name].oip, shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request.SerializeToString()
