"""Checks of gRPC's own services, health checking and reflection, on servers that have them."""

from __future__ import annotations

from oip_conformance.checks.metadata import UNKNOWN_NAME
from oip_conformance.checks.sources import GRPC, HEALTH, OBSERVED
from oip_conformance.protocol import probes_pb2 as probes
from oip_conformance.session import Session
from oip_conformance.suite import MUST, SHOULD, TRITON, Code, Skipped, check, must
from oip_conformance.target import SERVICE, Response

_CHECK, _WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
_SERVING = probes.HealthCheckResponse.SERVING


def _health(session: Session, service: str) -> Response:
    response = session.target.raw(_CHECK, probes.HealthCheckRequest(service=service).SerializeToString())
    return Response(probes.HealthCheckResponse.FromString(response.message), response.code) if response.ok else response


@check(
    "health.check", TRITON, OBSERVED, "grpc.health.v1 Check of the whole server is SERVING while the server is ready."
)
def server_health(session: Session) -> None:
    response = _health(session, "")
    must(response.ok, "SERVING", response, "Check of ''")
    must(response.message.status == _SERVING, "SERVING", response, "Check of ''")


@check(
    "health.service",
    SHOULD,
    HEALTH,
    "A service's own name can be asked for: inference.GRPCInferenceService is SERVING.",
)
def service(session: Session) -> None:
    response = _health(session, SERVICE)
    if response.code is Code.UNIMPLEMENTED:
        raise Skipped("the server has no health service")
    must(response.ok and response.message.status == _SERVING, "SERVING", response, f"Check of {SERVICE!r}")


@check("health.unknown-service", SHOULD, HEALTH, "If the service name is not registered, the server returns NOT_FOUND.")
def unknown_service(session: Session) -> None:
    response = _health(session, UNKNOWN_NAME)
    if response.code is Code.UNIMPLEMENTED:
        raise Skipped("the server has no health service")
    must(response.code is Code.NOT_FOUND, "NOT_FOUND", response, f"Check of {UNKNOWN_NAME!r}")


@check(
    "health.watch", MUST, HEALTH, "Watch sends the current status at once; a server without it answers UNIMPLEMENTED."
)
def watch(session: Session) -> None:
    stream = session.target.call_stream(
        _WATCH,
        [probes.HealthCheckRequest(service="")],
        probes.HealthCheckRequest.SerializeToString,
        probes.HealthCheckResponse.FromString,
        most=1,
    )
    if stream.code is Code.UNIMPLEMENTED:
        raise Skipped("the server has no Watch")
    must(stream.messages and stream.messages[0].status == _SERVING, "SERVING", stream, "Watch of ''")


@check(
    "reflection.services",
    MUST,
    GRPC,
    "Reflection lists the server's services; a server without it answers UNIMPLEMENTED.",
)
def reflection(session: Session) -> None:
    for version in ("v1", "v1alpha"):
        stream = session.target.call_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            [probes.ServerReflectionRequest(list_services="*")],
            probes.ServerReflectionRequest.SerializeToString,
            probes.ServerReflectionResponse.FromString,
        )
        if stream.code is not Code.UNIMPLEMENTED:
            names = [s.name for message in stream.messages for s in message.list_services_response.service]
            must(SERVICE in names, f"{SERVICE} among the services", stream, "list_services")
            return
    raise Skipped("the server has no reflection")
