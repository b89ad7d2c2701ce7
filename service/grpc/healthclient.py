"""The client side of grpc.health.v1: one Check of a server on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2

from bf16kit.messages.errors import Bf16kitError
from bf16kit.messages.wording import brief, quoted

_CHECK = "/grpc.health.v1.Health/Check"
_Status = health_pb2.HealthCheckResponse.ServingStatus


class NotServing(Bf16kitError):
    """The server or model is not serving, or no server answers."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """The TLS settings of a client.

    ``certificates``: trusted certificates (PEM). ``name``: the name that the server's certificate must be for.
    ``chain`` and ``key``: the client's own certificate and key (PEM), if the server requires one.
    """

    certificates: bytes
    name: str
    chain: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The server's address, as a gRPC target, and what its TLS requires."""

    target: str
    trust: ClientTls | None = None


def check(endpoint: Endpoint, service: str, seconds: float) -> str:
    """Check a service, waiting at most ``seconds``. Return "SERVING".

    ``service`` is a model's name, or "" for the server, which serves once every model is ready. Raises
    :class:`NotServing`, with the reason, for any other result and if there is none.
    """
    with _channel(endpoint) as channel:
        call: grpc.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse] = (
            channel.unary_unary(
                _CHECK,
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
        )
        try:
            reply = call(health_pb2.HealthCheckRequest(service=service), timeout=seconds)
        except grpc.RpcError as error:
            raise NotServing(f"{endpoint.target}: {_failure_reason(error, service, seconds)}") from None
    status = _Status.Name(reply.status)
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise NotServing(f"{endpoint.target}: {status}: {_what(service)} is not ready; the server's log says why")
    return status


def _channel(endpoint: Endpoint) -> grpc.Channel:
    options: list[tuple[str, int | str]] = [("grpc.enable_http_proxy", 0)]  # the server is on this machine
    if endpoint.trust is None:
        return grpc.insecure_channel(endpoint.target, options)
    trust = endpoint.trust
    options.append(("grpc.ssl_target_name_override", trust.name))
    return grpc.secure_channel(
        endpoint.target, grpc.ssl_channel_credentials(trust.certificates, trust.key, trust.chain), options
    )


def _failure_reason(error: grpc.RpcError, service: str, seconds: float) -> str:
    code, details = error.code(), brief(error.details() or "")
    if code is grpc.StatusCode.NOT_FOUND:
        return f"serves no {_what(service)}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {seconds:g} s"
    if code is grpc.StatusCode.UNAVAILABLE:
        return f"no server can be reached there: {details}"
    return f"{code.name}: {details}"


def _what(service: str) -> str:
    return f"model {quoted(service)}" if service else "server"
