"""Every RPC of every service: its path, its lane, and the method that answers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from bf16kit.messages.errors import RequestError, Unsupported
from bf16kit.protocol import inference_pb2 as pb
from service.config.tokens import Scope
from service.grpc.call import Rpc
from service.grpc.callcontext import CallContext
from service.grpc.control import CHANGES, OFF_REASONS, SETTINGS, ControlServicer
from service.grpc.credentials import Access, Metadata, RequiredScope
from service.grpc.health import HealthServicer
from service.grpc.lane import Handler
from service.grpc.reflection import reflection_handler
from service.grpc.servicer import InferenceServicer
from service.grpc.status import StatusTable
from service.wire.inflate import Inflater
from service.wire.skim import parser

#: The name on the wire; the stubs' own package (``bf16kit.inference``) never leaves the process.
SERVICE = "inference.GRPCInferenceService"
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]

_PROBES = ("ServerLive", "ServerReady", "ModelReady")
_MAX_BYTES_WITHOUT_TENSORS = 64 << 10  # largest request without tensors, in bytes
_EMPTY = ("ServerLive", "ServerReady", "ServerMetadata")  # their requests are empty


H = TypeVar("H")
_H = TypeVar("_H", covariant=True)
Opener = Callable[[Metadata], H]  # given a call's metadata, returns its handler


class LaneProtocol(Protocol[_H]):
    """Where calls of one kind come in. :class:`~service.grpc.lane.Lane` is gRPC's."""

    def open(self, rpc: Rpc, required: RequiredScope, metadata: Metadata) -> _H: ...
    def reject(self, error: RequestError, required: RequiredScope, metadata: Metadata) -> _H: ...


@dataclass(frozen=True)
class Lanes(Generic[H]):
    """The entrances for separate kinds of calls."""

    inference: LaneProtocol[H]
    streams: LaneProtocol[H]
    control: LaneProtocol[H]
    changes: LaneProtocol[H]
    watches: LaneProtocol[H]
    reflection: LaneProtocol[H]


class HandlerInterceptor(grpc.ServerInterceptor):
    """The interceptor that gives gRPC a handler when the headers of a call have arrived.

    It is an interceptor because of two constraints. :meth:`register` makes gRPC queue the calls of each RPC separately
    until its one thread reaches them. A health check then waits only behind other health checks, not behind a thousand
    inferences. But a registered handler alone would serve every call of its RPC without access to the headers.
    """

    def __init__(self, open_by_path: Mapping[str, Opener[Handler]]) -> None:
        self._open = open_by_path

    def register(self, server: grpc.Server) -> None:
        for path in self._open:
            service, method = path.lstrip("/").split("/")
            server.add_registered_method_handlers(service, {method: grpc.unary_unary_rpc_method_handler(_unreachable)})

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        opened = self._open.get(handler_call_details.method)
        return None if opened is None else opened(handler_call_details.invocation_metadata)


def _unreachable(message: bytes, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.INTERNAL, "the call came by no lane")


class RpcTable(Generic[H]):
    """Each RPC's lane, the method that answers it, and the scope that its token needs."""

    def __init__(self, lanes: Lanes[H], access: Access, statuses: StatusTable, max_message_bytes: int) -> None:
        self._lanes = lanes
        self._access = access
        self._statuses = statuses
        self._inflate_tensors = Inflater(max_message_bytes)
        self._inflate_small = Inflater(_MAX_BYTES_WITHOUT_TENSORS)

    def openers(
        self, servicer: InferenceServicer, control: ControlServicer, health: HealthServicer
    ) -> dict[str, Opener[H]]:
        """Return the function that opens a call of each RPC, by path.

        RPCs of the inference service that this server does not offer are rejected with the reason.
        """
        paths: dict[str, Opener[H]] = {}
        for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            paths[f"/{SERVICE}/{method.name}"] = self._inference(method, servicer, control)
        lanes, probe = self._lanes, self._access.scope_of("health")

        def watch(request: Any, call: CallContext, send: Any) -> None:
            health.watch(request, call.client, call.cancellation, send)

        check, watching = _HEALTH.methods_by_name["Check"], _HEALTH.methods_by_name["Watch"]
        paths[f"/{_HEALTH.full_name}/Check"] = self._opener(lanes.control, check, health.check, probe)
        paths[f"/{_HEALTH.full_name}/Watch"] = self._opener(lanes.watches, watching, watch, probe, kind="watch")
        info, scope = _REFLECTION.methods_by_name["ServerReflectionInfo"], self._access.scope_of("reflection")
        handler = reflection_handler((SERVICE, _HEALTH.full_name, _REFLECTION.full_name))
        paths[f"/{_REFLECTION.full_name}/{info.name}"] = self._opener(
            lanes.reflection, info, handler, scope, kind="stream"
        )
        return paths

    def _inference(self, method: Any, servicer: InferenceServicer, control: ControlServicer) -> Opener[H]:
        name, lanes = method.name, self._lanes
        if name == "ModelInfer":
            return self._opener(lanes.inference, method, servicer.ModelInfer, "infer", claim=servicer.claim)
        if name == "ModelStreamInfer":
            return self._opener(lanes.streams, method, servicer.ModelStreamInfer, "infer", kind="stream")
        manages = name in OFF_REASONS and name not in SETTINGS
        scope = self._access.scope_of("health") if name in _PROBES else "manage" if manages else "read"
        if not control.offers(name):
            error = Unsupported(f"{name}: {OFF_REASONS[name]}")
            return lambda metadata: lanes.control.reject(error, self._required_scope(scope), metadata)
        lane = lanes.changes if name in CHANGES else lanes.control
        return self._opener(lane, method, getattr(control, name), scope, reads_request=name not in _EMPTY)

    def _opener(
        self, lane: LaneProtocol[H], method: Any, handler: Any, scope: Scope | None, **rpc_options: Any
    ) -> Opener[H]:
        without_tensors = scope != "infer"
        inflate = self._inflate_small if without_tensors else self._inflate_tensors
        parse = parser(method.input_type, _MAX_BYTES_WITHOUT_TENSORS if without_tensors else None)
        serialize = GetMessageClass(method.output_type).SerializeToString
        rpc, required = Rpc(inflate, parse, serialize, handler, **rpc_options), self._required_scope(scope)
        return lambda metadata: lane.open(rpc, required, metadata)

    def _required_scope(self, scope: Scope | None) -> RequiredScope:
        return RequiredScope(self._access.tokens, scope)
