"""Checks of the server itself: liveness, readiness, metadata, and unknown RPCs."""

from __future__ import annotations

from oip_conformance.checks.sources import GRPC, OBSERVED, OIP
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.session import PROBES, Session
from oip_conformance.suite import MUST, TRITON, Code, check, must
from oip_conformance.target import SERVICE, rpc_of


@check("server.live", MUST, OIP, "ServerLive: true if the inference server is live, false if not live.")
def live(session: Session) -> None:
    response = session.target.call(pb.ServerLiveRequest())
    must(response.ok and response.message.live, "live: true", response, "ServerLive")


@check("server.ready", MUST, OIP, "ServerReady: true if the server is ready for inferencing.")
def ready(session: Session) -> None:
    response = session.target.call(pb.ServerReadyRequest())
    must(response.ok, "an answer", response, "ServerReady")
    index = session.target.call(pb.RepositoryIndexRequest())
    if index.ok and all(model.state in ("READY", "") for model in index.message.models):
        must(response.message.ready, "ready: true, as every model in the index is", response, "ServerReady")


@check("server.metadata", MUST, OIP, "ServerMetadata gives the server's name and version.")
def described(session: Session) -> None:
    response = session.target.call(pb.ServerMetadataRequest())
    must(
        response.ok and response.message.name and response.message.version,
        "a name and a version",
        response,
        "ServerMetadata",
    )


@check("server.extensions", MUST, OIP, "extensions: the extensions supported by the server; their RPCs are there.")
def extensions(session: Session) -> None:
    for extension in sorted(session.extensions & {*PROBES}):
        request = PROBES[extension](session.model.name)
        response = session.target.call(request)
        rpc = rpc_of(request)
        must(response.code is not Code.UNIMPLEMENTED, f"{rpc}, as {extension!r} is declared", response, rpc)


@check("server.unknown-rpc", MUST, GRPC, "An unknown method or service is answered with UNIMPLEMENTED.")
def unknown_rpc(session: Session) -> None:
    for path in (f"/{SERVICE}/NoSuchMethod", "/no.such.Service/Method"):
        response = session.target.raw(path, b"")
        must(response.code is Code.UNIMPLEMENTED, "UNIMPLEMENTED", response, path)


@check("server.unknown-fields", MUST, GRPC, "Unknown fields of a message are ignored.")
def unknown_fields(session: Session) -> None:
    newer = session.request().SerializeToString() + b"\xfa\xff\x03\x03new"  # field 8191, three bytes
    response = session.target.raw(f"/{SERVICE}/ModelInfer", newer)
    must(response.ok, "an answer", response, "a ModelInferRequest with a field 8191 beside its own")


@check("server.garbage", TRITON, OBSERVED, "Bytes that are not a message are rejected, and the server goes on serving.")
def garbage(session: Session) -> None:
    response = session.target.raw(f"/{SERVICE}/ModelInfer", b"\xff\xff\xff\xff")
    must(not response.ok, "a rejection", response, "the bytes ff ff ff ff for ModelInfer")
    session.alive()
