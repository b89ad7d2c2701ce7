"""Every RPC of every service: its path, its pool, the token that it needs, and the method that answers it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import grpc
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.config.tokens import Scope, TokenFile
from bf16kit.service.grpc.admission import RequiredScope, RpcPool
from bf16kit.service.grpc.call import Call, InferenceCall, Metadata, Rpc, UnaryCall, WatchCall
from bf16kit.service.grpc.control import CHANGES, ControlServicer, is_managing
from bf16kit.service.grpc.health import HealthServicer
from bf16kit.service.grpc.inference import InferenceServicer
from bf16kit.service.grpc.stream import StreamCall, StreamRequest
from bf16kit.service.wire.limits import MessageReader

#: The name on the wire; the stubs' own package (``bf16kit.inference``) never leaves the process.
SERVICE = "inference.GRPCInferenceService"
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
_INFER, _STREAM = "ModelInfer", "ModelStreamInfer"
_PROBES = ("ServerLive", "ServerReady", "ModelReady")  # need no token, as health: kubelet sends none
_MAX_BYTES_WITHOUT_TENSORS = 64 << 10  # largest request without tensors, in bytes

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic for type checkers only
_Open: TypeAlias = Callable[[Metadata], Handler]  # given a call's metadata, returns its handler


def open_by_path(
    pools: Mapping[str, RpcPool],
    servicer: InferenceServicer,
    control: ControlServicer,
    health: HealthServicer,
    tokens: TokenFile | None,
    max_message_bytes: int,
) -> dict[str, _Open]:
    """Return the function that opens a call of each RPC, by path."""

    def add(service: str, method: Any, pool: str, scope: Scope | None, kind: type[Call], handler: Any) -> None:
        read = MessageReader(method.input_type, max_message_bytes if scope == "infer" else _MAX_BYTES_WITHOUT_TENSORS)
        serialize = GetMessageClass(method.output_type).SerializeToString
        # Shared memory is large: it is not copied on the thread that all calls share.
        at_once = (lambda data: False) if servicer.reads_shared_memory else read.is_quick
        rpc = Rpc(pools[pool], RequiredScope(tokens, scope), read, serialize, handler, at_once)
        paths[f"/{service}/{method.name}"] = lambda metadata: _handler(kind(rpc, metadata), serialize)

    paths: dict[str, _Open] = {}
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        name = method.name
        if name == _INFER:
            add(SERVICE, method, "inference", "infer", InferenceCall, servicer.ModelInfer)
        elif name == _STREAM:
            add(SERVICE, method, "streams", "infer", StreamCall, servicer.ModelStreamInfer)
        else:
            pool = "changes" if name in CHANGES else "control"
            scope: Scope | None = None if name in _PROBES else "manage" if is_managing(name) else "read"
            add(SERVICE, method, pool, scope, UnaryCall, getattr(control, name))
    info = _REFLECTION.methods_by_name["ServerReflectionInfo"]
    add(_HEALTH.full_name, _HEALTH.methods_by_name["Check"], "control", None, UnaryCall, health.check)
    add(_HEALTH.full_name, _HEALTH.methods_by_name["Watch"], "watches", None, WatchCall, health.watch)
    add(_REFLECTION.full_name, info, "reflection", "read", StreamCall, _reflection_handler())
    return paths


def _handler(call: Any, serialize: Callable[[Any], bytes]) -> Handler:
    """Return gRPC's handler of a call whose headers have arrived.

    All have streams of requests, of which some read one: otherwise gRPC would read the request before admission.
    """
    received = call.received if isinstance(call, UnaryCall) else None
    if isinstance(call, UnaryCall) and not isinstance(call, WatchCall):
        return grpc.stream_unary_rpc_method_handler(call, received, serialize)
    return grpc.stream_stream_rpc_method_handler(call, received, serialize)


class HandlerInterceptor(grpc.ServerInterceptor):
    """The interceptor that gives gRPC a handler when the headers of a call have arrived.

    It is an interceptor because of two constraints. :meth:`register` makes gRPC queue the calls of each RPC separately
    until its one thread reaches them. A health check then waits only behind other health checks, not behind a thousand
    inferences. But a registered handler alone would serve every call of its RPC without access to the headers.
    """

    def __init__(self, paths: Mapping[str, _Open]) -> None:
        self._paths = paths

    def register(self, server: grpc.Server) -> None:
        for path in self._paths:
            service, method = path.lstrip("/").split("/")
            server.add_registered_method_handlers(service, {method: grpc.unary_unary_rpc_method_handler(_unreachable)})

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        opened = self._paths.get(handler_call_details.method)
        return None if opened is None else opened(handler_call_details.invocation_metadata)


def _unreachable(message: bytes, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.INTERNAL, "internal error: no handler for this RPC")


def _reflection_handler() -> Callable[[Iterator[StreamRequest], Any], Iterator[Any]]:
    """Return the function that answers a stream of reflection requests.

    It has its own descriptor pool, in which the service has its public package. Two files that define ``inference.*``
    cannot coexist in protobuf's default pool, which tritonclient uses too.
    """
    pool = DescriptorPool()
    pool.AddSerializedFile(public_file().SerializeToString())
    pool.AddSerializedFile(health_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(reflection_pb2.DESCRIPTOR.serialized_pb)
    servicer = reflection.ReflectionServicer((SERVICE, _HEALTH.full_name, _REFLECTION.full_name), pool=pool)
    return lambda requests, call: servicer.ServerReflectionInfo((request.message for request in requests), call)


def public_file() -> FileDescriptorProto:
    """Return the stubs' file with the package and every reference to it renamed, as in ``proto/inference.proto``."""
    own = FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    text = text_format.MessageToString(own).replace(f'".{own.package}.', '".inference.')
    file = text_format.Parse(text, FileDescriptorProto())
    file.name, file.package = "inference.proto", "inference"
    return file
