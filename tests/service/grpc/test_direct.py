"""The RPCs without a gRPC server: the same responses and rejections for bytes that another system delivers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from loopback import Gate, LoopbackModel, LoopbackRegistry, RequestLog, infer_request, serving, until

from bf16kit.protocol import inference_pb2 as pb
from service.grpc.direct import DirectCall, DirectResponse, DirectTransport
from service.grpc.handlers import SERVICE
from service.grpc.options import TransportOptions
from service.grpc.status import Status
from service.operations import Operations

X = np.arange(6, dtype=np.float32).reshape(2, 3)
INFER = f"/{SERVICE}/ModelInfer"
STREAM = f"/{SERVICE}/ModelStreamInfer"
WATCH = "/grpc.health.v1.Health/Watch"


class Desk:
    """A caller of :class:`DirectTransport`, as another system's proxy is."""

    def __init__(self, *models: LoopbackModel, **options: Any) -> None:
        self.models, self.log = models, RequestLog()
        self.registry = LoopbackRegistry(models)
        self.direct = DirectTransport(
            self.registry, self.log.refused, TransportOptions(**options), operations=Operations()
        )
        for model in models:
            model.log = self.log
            model.batcher.start()

    def open(self, path: str, deadline: float | None = None) -> DirectCall:
        call = self.direct.open(path, (), "ipv4:127.0.0.1:1", deadline)
        assert isinstance(call, DirectCall)
        return call

    def ask(self, path: str, data: bytes, deadline: float | None = None) -> DirectResponse:
        call = self.direct.open(path, (), "ipv4:127.0.0.1:1", deadline)
        if isinstance(call, Status):
            return call
        try:
            return call.respond(data)
        finally:
            call.end()

    def close(self) -> None:
        self.direct.stop(0)
        for model in self.models:
            model.batcher.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk(LoopbackModel(), max_message_bytes=4096)
    yield desk
    desk.close()


def told(answer: DirectResponse) -> tuple[StatusCode, str]:
    assert isinstance(answer, Status), answer
    return answer.code, answer.details


def test_every_rpc_of_the_protocol_is_known(desk: Desk) -> None:
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert {f"/{SERVICE}/{method.name}" for method in service.methods} <= set(desk.direct.paths)


@pytest.mark.parametrize("method", [m.name for m in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods])
def test_the_responses_equal_those_of_a_grpc_server(method: str) -> None:
    """Compare the response's bytes, or the code and the details, with those of a server on a socket."""
    rpc = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[method]
    if rpc.client_streaming:
        pytest.skip("a stream: below")
    message = infer_request(x=X) if method == "ModelInfer" else GetMessageClass(rpc.input_type)()
    desk = Desk(LoopbackModel())
    with serving(LoopbackModel()) as served:
        answer = desk.ask(f"/{SERVICE}/{method}", message.SerializeToString())
        if isinstance(answer, Status):
            assert served.refusal(method, message) == (answer.code, answer.details)
        else:
            assert served.call(method, message).SerializeToString(deterministic=True) == answer
    desk.close()


def test_bytes_that_cannot_be_parsed_are_an_invalid_argument(desk: Desk) -> None:
    assert told(desk.ask(INFER, b"\xff\xff"))[0] is StatusCode.INVALID_ARGUMENT


def test_a_message_over_the_limit_is_rejected_with_the_limit(desk: Desk) -> None:
    code, words = told(desk.ask(INFER, bytes(4097)))
    assert (code, words) == (StatusCode.RESOURCE_EXHAUSTED, "the message has 4097 bytes; max_message_bytes is 4096")


def test_a_request_whose_deadline_has_passed_is_not_run(desk: Desk) -> None:
    code, _ = told(desk.ask(INFER, infer_request(x=X).SerializeToString(), time.monotonic() - 1))
    assert code is StatusCode.DEADLINE_EXCEEDED
    assert not desk.models[0].calls
    asked = pb.ModelMetadataRequest(name="echo").SerializeToString()
    assert told(desk.ask(f"/{SERVICE}/ModelMetadata", asked, time.monotonic() - 1))[0] is StatusCode.DEADLINE_EXCEEDED


def test_an_unexpected_error_is_reported_by_its_incident_number(desk: Desk) -> None:
    desk.models[0]._run = lambda feeds: {"y": feeds["secret"]}
    code, words = told(desk.ask(INFER, infer_request(x=X).SerializeToString()))
    assert code is StatusCode.INTERNAL
    assert words.startswith("internal error, incident ")
    assert "secret" not in words


def test_a_request_that_leaves_the_queue_is_not_run() -> None:
    gate = Gate()
    desk = Desk(LoopbackModel(run=gate, max_batch_size=1))
    data = infer_request(x=X[:1]).SerializeToString()
    first = desk.direct.threads.submit(desk.ask, INFER, data)
    assert gate.started.wait(30)
    second = desk.open(INFER)
    waiting = desk.direct.threads.submit(second.respond, data)
    until(lambda: len(desk.models[0].seen) == 2)
    second.end()
    assert told(waiting.result(30))[0] is StatusCode.CANCELLED
    gate.go.set()
    assert isinstance(first.result(30), bytes)
    assert desk.models[0].calls == 1
    desk.close()


def test_calls_beyond_max_in_flight_are_rejected() -> None:
    gate = Gate()
    desk = Desk(LoopbackModel(run=gate), max_in_flight=1)
    data = infer_request(x=X).SerializeToString()
    first = desk.direct.threads.submit(desk.ask, INFER, data)
    assert gate.started.wait(30)
    assert told(desk.ask(INFER, data))[0] is StatusCode.RESOURCE_EXHAUSTED
    assert desk.log.refusals == ["in_flight"]
    gate.go.set()
    assert isinstance(first.result(30), bytes)
    assert isinstance(desk.ask(INFER, data), bytes)  # the first call's place is free again
    desk.close()


def test_a_stream_is_answered_in_order(desk: Desk) -> None:
    call = desk.open(STREAM)
    messages = [infer_request(x=X), infer_request("nobody", x=X), infer_request(x=X)]
    answers = list(call.respond_stream(message.SerializeToString() for message in messages))
    call.end()
    parsed = [pb.ModelStreamInferResponse.FromString(each) for each in answers if isinstance(each, bytes)]
    assert [bool(each.error_message) for each in parsed] == [False, True, False]
    assert parsed[2].infer_response.raw_output_contents[0] == X.tobytes()


def test_a_stream_with_a_message_that_cannot_be_parsed_ends_with_the_status(desk: Desk) -> None:
    call = desk.open(STREAM)
    answers = list(call.respond_stream(iter([infer_request(x=X).SerializeToString(), b"\xff"])))
    call.end()
    assert told(answers[-1])[0] is StatusCode.INVALID_ARGUMENT


def test_a_stream_gives_its_held_bytes_back(desk: Desk) -> None:
    call = desk.open(STREAM)
    for _ in call.respond_stream(infer_request(x=X).SerializeToString() for _ in range(50)):
        pass
    assert desk.direct._services.streams.budget._in_use == 0
    call.end()


def test_a_watch_gets_changes_and_ends_with_the_server(desk: Desk) -> None:
    said: SimpleQueue[DirectResponse | None] = SimpleQueue()
    call = desk.open(WATCH)
    call.watch(health_pb2.HealthCheckRequest().SerializeToString(), said.put)

    def status() -> int:
        answer = said.get(timeout=30)
        assert isinstance(answer, bytes)
        return int(health_pb2.HealthCheckResponse.FromString(answer).status)

    assert status() == health_pb2.HealthCheckResponse.SERVING
    desk.registry.change(desk.models[0], "loading")
    assert status() == health_pb2.HealthCheckResponse.NOT_SERVING
    desk.registry.change(desk.models[0], "ready")
    assert status() == health_pb2.HealthCheckResponse.SERVING
    stopping = threading.Thread(target=desk.direct.stop, args=(5,))
    stopping.start()
    assert status() == health_pb2.HealthCheckResponse.NOT_SERVING
    assert said.get(timeout=30) is None
    stopping.join()


def test_calls_after_a_stop_are_rejected(desk: Desk) -> None:
    assert desk.direct.stop(1)
    assert told(desk.ask(INFER, infer_request(x=X).SerializeToString()))[0] is StatusCode.UNAVAILABLE
