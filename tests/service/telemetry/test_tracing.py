"""Spans of requests over real sockets, sent to a real collector: parents, times, status, and lost traces."""

import json
import logging
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode
from loopback import LoopbackModel, Served, infer_request, serving
from ownlog import own_log
from waiting import until

pytest.importorskip(
    "opentelemetry.exporter.otlp.proto.grpc", reason="needs the extra otel: pip install 'bf16kit[otel]'"
)

from collector import Collector, Span, collecting

from bf16kit.messages.errors import ConfigError, RuntimeFailure
from bf16kit.numerics.tensors import Array
from bf16kit.service.request import Observation
from bf16kit.service.telemetry.settings import TraceSettings
from bf16kit.service.telemetry.tracing import CountedExporter, Tracing

X = np.ones((2, 3), np.float32)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASKED = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "vendor=1,other=2"))
SERVER, INTERNAL = 2, 1  # OTLP's kinds of spans
UNSET, ERROR = 0, 2  # and its statuses


class Outcomes(Counter[str]):
    """Counts traces by their outcome."""

    def __call__(self, outcome: str, traces: int) -> None:
        self[outcome] += traces


@contextmanager
def tracing(endpoint: str, rate: int = 1, seconds: float = 20.0) -> Iterator[tuple[Tracing, Outcomes]]:
    outcomes = Outcomes()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms
        tracing = Tracing(TraceSettings(rate, find=str), CountedExporter(outcomes))
    try:
        yield tracing, outcomes
    finally:
        tracing.close(seconds)


def one(tracer: Tracing, observation: Observation = Observation("m", "1", "", "OK", 0.1)) -> None:  # noqa: B008
    trace = tracer.sample("m", lambda key: None)
    assert trace is not None
    trace.end("ModelInfer", observation)


@contextmanager
def traced(rate: int = 1, *models: LoopbackModel) -> Iterator[tuple[Served, Collector, Outcomes]]:
    """Yield a server of ``models``, by default "echo", and the collector that gets its traces."""
    with (
        collecting() as (collected, endpoint),
        tracing(endpoint, rate) as (tracer, outcomes),
        serving(*models or (LoopbackModel(),), tracer=tracer) as served,
    ):
        yield served, collected, outcomes


def ask(served: Served, message: Any, metadata: Any = ASKED) -> Any:
    return served.stub("ModelInfer")(message, timeout=30, metadata=metadata)


def fail(feeds: Mapping[str, Array]) -> dict[str, Array]:
    raise RuntimeFailure("node 7 gave up")


def test_a_request_is_a_span_in_its_clients_trace_with_a_child_for_each_phase() -> None:
    with traced() as (served, collected, outcomes):
        before = time.time_ns()
        message = infer_request(x=X)
        message.id = "r-1"
        ask(served, message)
        after = time.time_ns()
        (span,) = collected.wait(1)
        until(lambda: outcomes["exported"] == 1)
        (seen,) = served.log.observations
    assert (span.name, span.kind) == ("inference.GRPCInferenceService/ModelInfer", SERVER)
    assert (span.trace, span.parent, span.state, span.status) == (TRACE, PARENT, "vendor=1,other=2", UNSET)
    assert seen.trace == TRACE
    assert span.attributes == {
        "rpc.system": "grpc", "rpc.service": "inference.GRPCInferenceService", "rpc.method": "ModelInfer",
        "rpc.grpc.status_code": 0, "bf16kit.model.name": "echo", "bf16kit.model.version": "1",
        "bf16kit.request.id": "r-1", "bf16kit.request.rows": 2,
    }  # fmt: skip
    assert before <= span.begin <= span.end <= after
    assert span.seconds >= seen.seconds - 1e-3  # read from another clock, and a little later
    children = collected.children(span)
    assert seen.timings is not None
    parts = {"queue": seen.timings.queue, "gather": seen.timings.compute_input, "run": seen.timings.compute_infer}
    for name, seconds in {**parts, "split": seen.timings.compute_output}.items():
        assert children[name].seconds == pytest.approx(seconds, abs=1e-6)
        assert (children[name].kind, children[name].trace) == (INTERNAL, TRACE)
    times = [children[name] for name in ("queue", "gather", "run", "split")]
    assert span.begin <= times[0].begin
    assert all(one.end <= next_one.begin + 1000 for one, next_one in pairwise(times))
    assert times[-1].end <= span.end
    assert children["run"].attributes == {"bf16kit.batch.rows": 2}


def test_the_log_line_of_a_request_has_its_trace_id() -> None:
    with traced(10**6) as (served, _, _), own_log("debug", "json") as stream:
        ask(served, infer_request(x=X))
        served.call("ModelInfer", infer_request(x=X))
        until(lambda: stream.getvalue().count("request answered") == 2)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line.get("trace_id") for line in lines if line["message"] == "request answered"] == [TRACE, None]


def test_each_request_of_a_stream_is_a_span() -> None:
    with traced() as (served, collected, _):
        list(served.stub("ModelStreamInfer")(iter([infer_request(x=X)] * 3), timeout=30, metadata=ASKED))
        servers = collected.wait(3)
    assert {(span.trace, span.parent) for span in servers} == {(TRACE, PARENT)}
    assert {span.attributes["rpc.method"] for span in servers} == {"ModelStreamInfer"}


def test_failed_spans_have_their_code_and_only_server_errors_are_errors() -> None:
    with traced(1, LoopbackModel("bad", fail)) as (served, collected, _):
        asked = {
            "INTERNAL": (13, ERROR, infer_request("bad", x=X)),
            "NOT_FOUND": (5, UNSET, infer_request("nobody", x=X)),
            "INVALID_ARGUMENT": (3, UNSET, infer_request("bad")),
        }
        for name, (_, _, message) in asked.items():
            assert served.refusal("ModelInfer", message)[0] is StatusCode[name]
        found: dict[int, Span] = {span.attributes["rpc.grpc.status_code"]: span for span in collected.wait(3)}
    assert {code: span.status for code, span in found.items()} == {code: status for code, status, _ in asked.values()}
    assert list(collected.children(found[13])) == ["queue", "run"]
    assert (collected.children(found[5]), found[5].attributes["bf16kit.model.name"]) == ({}, "nobody")


@pytest.mark.parametrize(
    ("header", "times"),
    [
        (f"00-{TRACE}-{PARENT}-01", 1),
        (f"00-{TRACE}-{PARENT}-00", 0),  # the client does not record its trace
        (f"00-{'0' * 32}-{PARENT}-01", 0),  # invalid: handled as no header, and the rate is one in a million
        ("nonsense" * 100, 0),
        (f"ff-{TRACE}-{PARENT}-01", 0),
    ],
)
def test_the_traceparent_header_decides_whether_a_request_is_traced(header: str, times: int) -> None:
    with traced(10**6) as (served, collected, _):
        ask(served, infer_request(x=X), (("traceparent", header), ("tracestate", "=;not one")))
        served.call("ModelInfer", infer_request(x=X))
    assert [span.trace for span in collected.servers()] == [TRACE] * times  # all waiting spans have been exported


def test_one_of_rate_requests_is_traced_without_a_traceparent() -> None:
    with traced(5) as (served, collected, _):
        for _ in range(20):
            served.call("ModelInfer", infer_request(x=X))
        servers = collected.wait(4)
    assert len({span.trace for span in servers}) == 4
    assert {span.parent for span in servers} == {""}
    traces = [seen.trace for seen in served.log.observations]
    assert sorted(filter(None, traces)) == sorted(span.trace for span in servers)


def test_payloads_tokens_and_metadata_are_not_exported() -> None:
    secret = "s3cr3t-of-an-application"
    with traced() as (served, collected, _):
        message = infer_request(x=np.full((1, 3), 1.25e-7, np.float32))
        ask(served, message, (*ASKED, ("authorization", f"Bearer {secret}"), ("x-patient", "a-patients-name")))
        collected.wait(1)
    assert PARENT in collected.raw.hex()
    for hidden in (secret.encode(), b"a-patients-name", b"127.0.0.1", np.float32(1.25e-7).tobytes()):
        assert hidden not in collected.raw


def test_a_clients_strings_are_shortened_and_spans_that_cannot_be_made_fail_no_request() -> None:
    with collecting() as (collected, endpoint), tracing(endpoint) as (tracer, _):
        one(tracer, Observation("m", "1", "", "NO_SUCH_CODE", 0.1))
        one(tracer, Observation("m" * 10**6, "v" * 10**6, "i" * 10**6, "NOT_FOUND", 0.1))
        (span,) = collected.wait(1)
    texts = [span.attributes[f"bf16kit.{name}"] for name in ("model.name", "model.version", "request.id")]
    assert [len(text) for text in texts] == [256, 256, 256]


def test_a_stop_aborts_an_export_that_takes_too_long(caplog: pytest.LogCaptureFixture) -> None:
    """The collector accepts connections and never responds: the exporter would wait for 10 s, and a stop for 30."""
    with (
        socket.create_server(("127.0.0.1", 0)) as deaf,
        tracing(f"http://127.0.0.1:{deaf.getsockname()[1]}", seconds=0.1) as (tracer, _),
    ):
        one(tracer)
        deaf.accept()[0].close()  # the export has begun
        begun = time.monotonic()
    assert time.monotonic() - begun < 8
    assert "the last traces are lost" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-1"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "x"),
    ],
)
def test_a_variable_that_opentelemetry_cannot_use_is_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="OTEL_"):
        Tracing(TraceSettings(1, find=str), CountedExporter(Outcomes()))


@pytest.mark.long
def test_a_collector_that_is_down_is_logged_once_each_time_with_the_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # second; by default it retries for 10
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tracing(f"http://127.0.0.1:{port}") as (tracer, outcomes):
        for lost in (1, 2):
            one(tracer)
            until(lambda lost=lost: outcomes["failed"] == lost)  # type: ignore[misc]
        with collecting(port) as (collected, _):

            def delivered() -> bool:
                one(tracer)
                return outcomes["exported"] > 0

            until(delivered)
            assert collected.servers()
            told = [record.message for record in caplog.records if record.name == "bf16kit.service.telemetry.tracing"]
    assert f"127.0.0.1:{port}, error code: StatusCode.UNAVAILABLE" in told[0]
    assert told[0].startswith("traces are being lost; requests are still served: ")
    assert told[1:] == ["traces are delivered again"]
    assert not any(record.name.startswith("opentelemetry.exporter") for record in caplog.records)
