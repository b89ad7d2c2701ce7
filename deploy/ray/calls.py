"""The served RPCs by path, and the metadata that a replica gets besides a request's bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from bf16kit.protocol import inference_pb2 as pb
from service.grpc.handlers import SERVICE

Kind = Literal["unary", "watch", "stream"]
Metadata = tuple[tuple[str, str | bytes], ...]

FRONT = "bf16kit"  # the application for everything that concerns no single model
APPLICATION = "application"  # Ray's metadata key, by which its proxy chooses an application
SECONDS_LEFT = "bf16kit-seconds-left"  # until the client's deadline, which gRPC does not pass on as metadata
# Settings that Ray's proxies read from the environment, the only way to pass them.
PROXY_SETTINGS = ("max_message_bytes", "stream_idle_seconds", "overload_status")
# Ray's own metadata: values from a client must not reach Ray.
_ROUTING_KEYS = (APPLICATION, SECONDS_LEFT, "request_id", "multiplexed_model_id", "session_id")


class Rpc(NamedTuple):
    """One RPC. ``method`` is the replica's method; by Ray's rule it is the last part of the path."""

    path: str
    method: str
    kind: Kind


def _rpc(service: str, method: Any) -> Rpc:
    kind: Kind = "stream" if method.client_streaming else "watch" if method.server_streaming else "unary"
    return Rpc(f"/{service}/{method.name}", method.name, kind)


def _rpcs() -> Iterable[Rpc]:
    health = health_pb2.DESCRIPTOR.services_by_name["Health"]
    reflection = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    inference = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    for name, service in ((SERVICE, inference), (health.full_name, health), (reflection.full_name, reflection)):
        yield from (_rpc(name, method) for method in service.methods)


RPCS: Mapping[str, Rpc] = {rpc.path: rpc for rpc in _rpcs()}
INFER = f"/{SERVICE}/ModelInfer"
STREAM = f"/{SERVICE}/ModelStreamInfer"


def application(model: str) -> str:
    """Return the name of the application that serves ``model``."""
    return f"{FRONT}.{model}"


def add_routing(metadata: Iterable[tuple[str, str | bytes]], app: str, seconds_left: float | None) -> Metadata:
    """Return a client's metadata plus what Ray's proxy and the replica need."""
    kept = tuple((name, value) for name, value in metadata if name not in _ROUTING_KEYS)
    left = () if seconds_left is None else ((SECONDS_LEFT, f"{max(0.0, seconds_left):.6f}"),)
    return (*kept, (APPLICATION, app), *left)


def strip_routing(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[Metadata, float | None]:
    """Return the client's own metadata, and the seconds until its deadline; None: no deadline."""
    found = tuple((name, value) for name, value in metadata)
    left = next((float(value) for name, value in found if name == SECONDS_LEFT), None)
    return tuple(pair for pair in found if pair[0] not in _ROUTING_KEYS), left
