"""Checks of gRPC's own services, health checking and reflection, on servers that have them."""

from __future__ import annotations

from conformance.checks.metadata import NOBODY
from conformance.checks.sources import GRPC, HEALTH, SEEN
from conformance.protocol import probes_pb2 as probes
from conformance.session import Session
from conformance.suite import Code, Level, Skipped, check, must
from conformance.target import SERVICE, Answer

_CHECK, _WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
_SERVING = probes.HealthCheckResponse.SERVING


def _health(session: Session, service: str) -> Answer:
    answer = session.target.raw(_CHECK, probes.HealthCheckRequest(service=service).SerializeToString())
    return Answer(probes.HealthCheckResponse.FromString(answer.message), answer.code) if answer.ok else answer


@check(
    "health.check", Level.TRITON, SEEN, "grpc.health.v1 Check of the whole server is SERVING while the server is ready."
)
def whole(session: Session) -> None:
    answer = _health(session, "")
    must(answer.ok, "SERVING", answer, "Check of ''")
    must(answer.message.status == _SERVING, "SERVING", answer, "Check of ''")


@check(
    "health.service",
    Level.SHOULD,
    HEALTH,
    "A service's own name can be asked for: inference.GRPCInferenceService is SERVING.",
)
def service(session: Session) -> None:
    answer = _health(session, SERVICE)
    if answer.code is Code.UNIMPLEMENTED:
        raise Skipped("the server has no health service")
    must(answer.ok and answer.message.status == _SERVING, "SERVING", answer, f"Check of {SERVICE!r}")


@check(
    "health.unknown-service",
    Level.SHOULD,
    HEALTH,
    "If the service name is not registered, the server returns NOT_FOUND.",
)
def unknown_service(session: Session) -> None:
    answer = _health(session, NOBODY)
    if answer.code is Code.UNIMPLEMENTED:
        raise Skipped("the server has no health service")
    must(answer.code is Code.NOT_FOUND, "NOT_FOUND", answer, f"Check of {NOBODY!r}")


@check(
    "health.watch",
    Level.MUST,
    HEALTH,
    "Watch sends the current status at once; a server without it answers UNIMPLEMENTED.",
)
def watch(session: Session) -> None:
    seen = session.target.converse(
        _WATCH,
        [probes.HealthCheckRequest(service="")],
        probes.HealthCheckRequest.SerializeToString,
        probes.HealthCheckResponse.FromString,
        most=1,
    )
    if seen.code is Code.UNIMPLEMENTED:
        raise Skipped("the server has no Watch")
    must(seen.messages and seen.messages[0].status == _SERVING, "SERVING", seen, "Watch of ''")


@check(
    "reflection.services",
    Level.MUST,
    GRPC,
    "Reflection lists the services that are there; a server without it answers UNIMPLEMENTED.",
)
def reflection(session: Session) -> None:
    for version in ("v1", "v1alpha"):
        seen = session.target.converse(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            [probes.ServerReflectionRequest(list_services="*")],
            probes.ServerReflectionRequest.SerializeToString,
            probes.ServerReflectionResponse.FromString,
        )
        if seen.code is not Code.UNIMPLEMENTED:
            names = [s.name for message in seen.messages for s in message.list_services_response.service]
            must(SERVICE in names, f"{SERVICE} among the services", seen, "list_services")
            return
    raise Skipped("the server has no reflection")
