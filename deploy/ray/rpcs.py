"""The RPCs that Ray's gRPC proxies accept for the front, and what the front and the replicas hand each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2

from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.config.tokens import Scope
from bf16kit.service.grpc.admission import ByteBudget, MessageBytes, Permit
from bf16kit.service.grpc.handlers import SERVICE, public_file
from bf16kit.service.wire.limits import MessageReader

FRONT = "bf16kit"  # the application that gets every request: the only one with a route, which Ray's proxies need
SERVICER_FUNCTION = "bf16kit.deploy.ray.rpcs.add_services"
_WITHOUT_TENSORS = 64 << 10  # bytes: largest request without tensors, as in bf16-serve
_WITH_TENSORS = 1 << 31  # bytes: Ray's proxies apply max_message_bytes, and a message of protobuf has 2 GiB at most
_PROBES = ("ServerLive", "ServerReady", "ModelReady", "Check", "Watch")
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_METHODS: Mapping[str, Any] = {
    SERVICE: pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods,
    _HEALTH.full_name: _HEALTH.methods,
}
_KINDS: Mapping[tuple[bool, bool], Any] = {  # by whether client and server stream
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def application(model: str) -> str:
    """Return the name of the application that serves ``model``."""
    return f"{FRONT}.{model}"


class Rpc(NamedTuple):
    """One RPC. ``name`` is the last part of its path, and by Ray's rule the name of the front's method for it.

    ``scope`` is the one that its token needs; None: it needs no token. ``parse`` returns the message in some bytes; it
    calls a function with the memory that this takes, and raises InvalidRequest.
    """

    name: str
    unary: bool
    scope: Scope | None
    parse: Callable[[bytes, Callable[[int], None]], Any]


def _rpc(method: Any) -> Rpc:
    infers = method.name in ("ModelInfer", "ModelStreamInfer")
    scope: Scope | None = None if method.name in _PROBES else "infer" if infers else "read"
    parse = MessageReader(method.input_type, _WITH_TENSORS if infers else _WITHOUT_TENSORS)
    return Rpc(method.name, not method.server_streaming, scope, parse)


RPCS: Mapping[str, Rpc] = {method.name: _rpc(method) for methods in _METHODS.values() for method in methods}


def add_services(servicer: object, server: Any) -> None:
    """Add the RPCs to the server of one of Ray's proxies, which calls this, and answers by the front's methods.

    Messages stay bytes: the proxy has no reason to parse them. For Ray's reflection service, the inference service is
    described as clients know it, in the package ``inference``.
    """
    descriptor_pool.Default().AddSerializedFile(public_file().SerializeToString())
    for service, methods in _METHODS.items():
        # Ray's proxy takes only the kind of an RPC from its handler.
        handlers = {m.name: _KINDS[m.client_streaming, m.server_streaming](lambda *_: None) for m in methods}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


class Serialized:
    """A serialised response. Ray sends what ``SerializeToString`` returns, as of any message."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 -- protobuf's name
        return self._data


@contextmanager
def held_bytes(budget: ByteBudget) -> Iterator[MessageBytes]:
    """Count one request and its response until the block ends, which a thread of the request may outlast."""
    permit = Permit(None, budget, "")
    try:
        yield MessageBytes(permit)
    finally:
        permit.release()
