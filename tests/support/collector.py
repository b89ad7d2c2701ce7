"""A trace collector on a real socket. It accepts OTLP over gRPC, as OpenTelemetry's own collector does."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services
from waiting import until


@dataclass(frozen=True)
class Span:
    """One span. Ids are hexadecimal, times are in ns since the epoch."""

    name: str
    trace: str
    id: str
    parent: str
    begin: int
    end: int
    kind: int
    status: int
    state: str
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e9


class Collector:
    """Keeps what is exported to it. While ``open`` is not set, it accepts requests and delays each response by up to
    60 s."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}
        self.processes: set[int] = set()  # ids of the processes that exported
        self.raw = b""
        self.headers: dict[str, Any] = {}
        self.open = threading.Event()
        self.open.set()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.open.wait(60)
        self.raw += request.SerializeToString()
        self.headers = dict(context.invocation_metadata())
        for of_resource in request.resource_spans:
            self.resource = _attributes(of_resource.resource.attributes)
            self.processes.add(self.resource["process.pid"])
            self.spans += [_span(span) for scope in of_resource.scope_spans for span in scope.spans]
        return messages.ExportTraceServiceResponse()

    def servers(self) -> list[Span]:
        """Return the spans of whole requests."""
        return [span for span in self.spans if span.name.startswith("inference.")]

    def wait(self, requests: int) -> list[Span]:
        """Wait for the spans of exactly ``requests`` requests and return them."""
        until(lambda: len(self.servers()) >= requests, what=f"{requests} requests' spans")
        assert len(self.servers()) == requests
        return self.servers()

    def children(self, of: Span) -> dict[str, Span]:
        """Return the children of a span, by name."""
        return {span.name: span for span in self.spans if span.parent == of.id}


def _attributes(found: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in found}


def _span(span: Any) -> Span:
    return Span(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        begin=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        kind=span.kind,
        status=span.status.code,
        state=span.trace_state,
        attributes=_attributes(span.attributes),
    )


@contextmanager
def collecting(port: int = 0) -> Iterator[tuple[Collector, str]]:
    """Yield a running collector and the address to configure."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(4))
    adder: Any = services.add_TraceServiceServicer_to_server
    adder(collector, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        collector.open.set()
        server.stop(0).wait()
