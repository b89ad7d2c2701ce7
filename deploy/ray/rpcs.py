"""The RPCs that Ray's gRPC proxies accept for the front, and what the front and the replicas hand each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2

from bf16kit.messages.errors import Overloaded
from bf16kit.protocol import inference_pb2 as pb
from service.grpc.handlers import SERVICE
from service.grpc.reflection import public_file
from service.wire.limits import MessageReader

FRONT = "bf16kit"  # the application that gets every request: the only one with a route, which Ray's proxies need
SERVICER_FUNCTION = "deploy.ray.rpcs.add_services"
_WITHOUT_TENSORS = 64 << 10  # bytes: largest request without tensors, as in bf16-serve
_WITH_TENSORS = 1 << 31  # bytes: Ray's proxies apply max_message_bytes, and a message of protobuf has 2 GiB at most
_PROBES = ("ServerLive", "ServerReady", "ModelReady", "Check", "Watch")
_HANDLERS: Mapping[str, Any] = {
    "unary": grpc.unary_unary_rpc_method_handler,
    "watch": grpc.unary_stream_rpc_method_handler,
    "stream": grpc.stream_stream_rpc_method_handler,
}


def application(model: str) -> str:
    """Return the name of the application that serves ``model``."""
    return f"{FRONT}.{model}"


class Rpc(NamedTuple):
    """One RPC. ``method`` is the last part of its path, and by Ray's rule the name of the front's method for it.

    ``scope`` is the one that its token needs; None: it needs no token. ``parse`` returns the message in some bytes; it
    calls a function with the memory that this takes, and raises InvalidRequest.
    """

    service: str
    method: str
    kind: Literal["unary", "watch", "stream"]
    scope: Literal["infer", "read"] | None
    parse: Callable[[bytes, Callable[[int], None]], Any]


def _rpc(service: str, method: Any) -> Rpc:
    infers = method.name in ("ModelInfer", "ModelStreamInfer")
    kind: Any = "stream" if method.client_streaming else "watch" if method.server_streaming else "unary"
    scope: Any = None if method.name in _PROBES else "infer" if infers else "read"
    most = _WITH_TENSORS if infers else _WITHOUT_TENSORS
    return Rpc(service, method.name, kind, scope, MessageReader(method.input_type, most))


_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_INFERENCE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
RPCS: Mapping[str, Rpc] = {
    method.name: _rpc(name, method)
    for name, service in ((SERVICE, _INFERENCE), (_HEALTH.full_name, _HEALTH))
    for method in service.methods
}


def add_services(servicer: object, server: Any) -> None:
    """Add the RPCs to the server of one of Ray's proxies, which calls this, and answers by the front's methods.

    Messages stay bytes: the proxy has no reason to parse them. For Ray's reflection service, the inference service is
    described as clients know it, in the package ``inference``.
    """
    descriptor_pool.Default().AddSerializedFile(public_file().SerializeToString())
    for service in (SERVICE, _HEALTH.full_name):
        handlers = {m: _HANDLERS[rpc.kind](lambda *_: None) for m, rpc in RPCS.items() if rpc.service == service}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


class Serialized:
    """A serialised response. Ray sends what ``SerializeToString`` returns, as of any message."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 -- protobuf's name
        return self._data


class ByteBudget:
    """The bytes that requests and their responses hold together, at most ``limit``. A request alone may exceed it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self.lock = threading.Lock()  # guards the number here, and those of each HeldBytes


class HeldBytes:
    """The bytes of one request and its response, until the block ends, which a thread of the request may outlast."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._nbytes = self._request = 0
        self._ended = False

    def reserve(self, nbytes: int) -> None:
        """Count ``nbytes`` for the request; of several calls the largest counts. Raises Overloaded."""
        self.reserve_more(max(0, nbytes - self._request))
        self._request = max(nbytes, self._request)

    def reserve_more(self, nbytes: int) -> None:
        """Count ``nbytes`` in addition. Raises Overloaded."""
        budget = self._budget
        with budget.lock:
            if self._ended:
                return
            if budget.in_use > self._nbytes and budget.in_use + nbytes > budget.limit:
                limit = f"requests and responses hold {budget.in_use} bytes, the limit is {budget.limit}"
                raise Overloaded(f"{limit}; try again later", "bytes")
            budget.in_use += nbytes
            self._nbytes += nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._budget.lock:
            self._ended = True
            self._budget.in_use -= self._nbytes
