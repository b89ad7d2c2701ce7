"""Every RPC of every service: its path on the wire, the lane it comes in by, and what answers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from bf16kit.errors import Unsupported
from bf16kit.protocol import inference_pb2 as pb
from service.transport.call import Rpc
from service.transport.health import HealthServicer
from service.transport.lane import Handler, Lane, refusal
from service.transport.reflection import reflection_answer
from service.transport.servicer import InferenceServicer
from service.transport.status import StatusTable

#: On the wire; the stubs' own package (``bf16kit.inference``) never leaves the process.
SERVICE = "inference.GRPCInferenceService"
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]

_REFUSED = {
    "RepositoryModelLoad": "models are loaded from the repository when the server starts; restart it to load others",
    "RepositoryModelUnload": "models stay loaded as long as the server runs; restart it without them",
    "SystemSharedMemoryStatus": "shared memory is not supported; send tensors in raw_input_contents",
    "SystemSharedMemoryRegister": "shared memory is not supported; send tensors in raw_input_contents",
    "SystemSharedMemoryUnregister": "shared memory is not supported; send tensors in raw_input_contents",
}
_EMPTY = ("ServerLive", "ServerReady", "ServerMetadata")  # their requests say nothing


@dataclass(frozen=True, slots=True)
class Lanes:
    """By which kinds of calls come in, apart from each other."""

    inference: Lane
    streams: Lane
    control: Lane
    watches: Lane
    reflection: Lane


class Handlers(grpc.GenericRpcHandler):
    """gRPC asks it for a handler when the headers of a call have arrived."""

    def __init__(self, open_by_path: Mapping[str, Callable[[], Handler]]) -> None:
        self._open = open_by_path

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        opened = self._open.get(handler_call_details.method)
        return None if opened is None else opened()


def handlers(
    servicer: InferenceServicer, health: HealthServicer, lanes: Lanes, statuses: StatusTable
) -> grpc.GenericRpcHandler:
    """A handler for every RPC; those of ``GRPCInferenceService`` that are not served are refused with the reason."""
    paths: dict[str, Callable[[], Handler]] = {}
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        paths[f"/{SERVICE}/{method.name}"] = _inference(method, servicer, lanes, statuses)
    check, watch = _HEALTH.methods_by_name["Check"], _HEALTH.methods_by_name["Watch"]
    paths[f"/{_HEALTH.full_name}/Check"] = _opener(lanes.control, check, health.check)
    paths[f"/{_HEALTH.full_name}/Watch"] = _opener(
        lanes.watches, watch, lambda request, call, send: health.watch(request, call.cancellation, send), kind="watch"
    )
    info = _REFLECTION.methods_by_name["ServerReflectionInfo"]
    services = (SERVICE, _HEALTH.full_name, _REFLECTION.full_name)
    paths[f"/{_REFLECTION.full_name}/{info.name}"] = _opener(
        lanes.reflection, info, reflection_answer(services), kind="stream"
    )
    return Handlers(paths)


def _inference(method: Any, servicer: InferenceServicer, lanes: Lanes, statuses: StatusTable) -> Callable[[], Handler]:
    name = method.name
    if name in _REFUSED:
        refused = refusal(statuses.of(Unsupported(f"{name}: {_REFUSED[name]}")))
        return lambda: refused
    answer = getattr(servicer, name)
    if name == "ModelInfer":
        return _opener(lanes.inference, method, answer)
    if name == "ModelStreamInfer":
        return _opener(lanes.streams, method, answer, kind="stream")
    return _opener(lanes.control, method, lambda message, call: answer(message), reads=name not in _EMPTY)


def _opener(lane: Lane, method: Any, answer: Callable[..., Any], **more: Any) -> Callable[[], Handler]:
    parse = GetMessageClass(method.input_type).FromString
    serialize = GetMessageClass(method.output_type).SerializeToString
    rpc = Rpc(parse, serialize, answer, **more)
    return lambda: lane.open(rpc)
