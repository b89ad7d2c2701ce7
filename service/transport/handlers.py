"""The servicer as gRPC wants it: a handler per RPC of the descriptor, under the path that the wire knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from bf16kit.errors import Unsupported
from bf16kit.protocol import inference_pb2 as pb
from service.transport.servicer import InferenceServicer
from service.transport.status import StatusTable

#: On the wire; the stubs' own package (``bf16kit.inference``) never leaves the process.
SERVICE = "inference.GRPCInferenceService"

_REFUSED = {
    "RepositoryModelLoad": "models are loaded from the repository when the server starts; restart it to load others",
    "RepositoryModelUnload": "models stay loaded as long as the server runs; restart it without them",
    "SystemSharedMemoryStatus": "shared memory is not supported; send tensors in raw_input_contents",
    "SystemSharedMemoryRegister": "shared memory is not supported; send tensors in raw_input_contents",
    "SystemSharedMemoryUnregister": "shared memory is not supported; send tensors in raw_input_contents",
}
#: These take the context, because they need the caller's deadline and departure, and map their errors themselves.
_WITH_CONTEXT = ("ModelInfer", "ModelStreamInfer")

Behavior = Callable[[Any, grpc.ServicerContext], Any]


def inference_handlers(servicer: InferenceServicer, statuses: StatusTable) -> grpc.GenericRpcHandler:
    """A handler for every RPC of ``GRPCInferenceService``; those not served answer UNIMPLEMENTED with the reason."""
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {method.name: _handler(method, _behavior(method.name, servicer, statuses)) for method in service.methods},
    )


def _behavior(name: str, servicer: InferenceServicer, statuses: StatusTable) -> Behavior:
    if name in _WITH_CONTEXT:
        behavior: Behavior = getattr(servicer, name)
        return behavior
    if name in _REFUSED:
        return _mapped(_refusal(name), statuses)
    return _mapped(getattr(servicer, name), statuses)


def _refusal(name: str) -> Callable[[Any], Any]:
    def refuse(message: Any) -> Any:
        raise Unsupported(f"{name}: {_REFUSED[name]}")

    return refuse


def _mapped(method: Callable[[Any], Any], statuses: StatusTable) -> Behavior:
    """``method``, with its errors turned into statuses."""

    def behave(message: Any, context: grpc.ServicerContext) -> Any:
        try:
            return method(message)
        except Exception as error:  # noqa: BLE001 -- the table decides what the caller may know
            status = statuses.of(error)
            return context.abort(status.code, status.details)

    return behave


def _handler(method: MethodDescriptor, behavior: Behavior) -> grpc.RpcMethodHandler[Any, Any]:
    make = grpc.stream_stream_rpc_method_handler if method.client_streaming else grpc.unary_unary_rpc_method_handler
    return make(
        behavior,
        request_deserializer=GetMessageClass(method.input_type).FromString,
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )
