"""ModelStreamInfer over a real socket: order, errors in the stream or as its status, batches, and cancelled streams."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import StatusCode
from loopback import Gate, LoopbackModel, Served, infer_request, serving
from waiting import stays, until

from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.grpc.handlers import SERVICE

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(LoopbackModel()) as served:
        yield served


def numbered(number: int) -> pb.ModelInferRequest:
    message = infer_request(x=X)
    message.id = str(number)
    return message


def test_requests_of_one_stream_share_a_batch() -> None:
    gate = Gate()
    model = LoopbackModel(run=gate, max_batch_size=8)
    with serving(model) as served:
        answers = served.stub("ModelStreamInfer")(iter([infer_request(x=X[:1]) for _ in range(9)]), timeout=30)
        assert gate.started.wait(30)
        until(lambda: len(model.seen) == 9)  # all of them arrived while the first ran
        gate.go.set()
        assert len(list(answers)) == 9
        assert model.calls < 9


@contextmanager
def another_client(served: Served) -> Iterator[Served]:
    """Yield the server with a separate connection: channels of one process otherwise share theirs."""
    with grpc.insecure_channel(served.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield replace(served, channel=channel)


def forty(model: str) -> Iterator[pb.ModelInferRequest]:
    return iter([infer_request(model, x=X[:1]) for _ in range(40)])


def test_streams_to_stuck_models_of_one_connection_do_not_delay_other_streams() -> None:
    """Every stream has a thread of its own, which waits for room in its model's queue."""
    gate = Gate()
    stuck = [LoopbackModel(f"stuck{n}", run=gate, max_batch_size=1, max_queue=4) for n in range(2)]
    with serving(*stuck, LoopbackModel(), max_in_flight=4, max_streams=16) as served:
        streams = [served.stub("ModelStreamInfer")(forty(f"stuck{n % 2}"), timeout=60) for n in range(10)]
        # Of each model one runs and four wait in its queue; the next one of every stream waits for room.
        until(lambda: sum(len(model.seen) for model in stuck) == 2 * (1 + 4) + 10)
        with another_client(served) as other:
            answers = list(other.stub("ModelStreamInfer")(iter([numbered(n) for n in range(40)]), timeout=30))
        assert [answer.infer_response.id for answer in answers] == [str(n) for n in range(40)]
        gate.go.set()
        for stream in streams:
            assert not any(answer.error_message for answer in stream)  # held back, and none of them rejected


def test_a_held_back_stream_ends_with_its_client_or_the_server() -> None:
    gate = Gate()
    model = LoopbackModel(run=gate)
    with serving(model) as served:
        left, kept = (served.stub("ModelStreamInfer")(forty("echo"), timeout=60) for _ in range(2))
        until(lambda: len(model.seen) == 32)
        left.cancel()
        until(lambda: served.transport.pools["streams"].shares.in_use == 1)
        stopping = threading.Timer(0, served.transport.stop, (300.0,))
        stopping.start()
        until(served.reports_draining)
        gate.go.set()
        with pytest.raises(grpc.RpcError) as ended:
            list(kept)
        assert ended.value.code() is StatusCode.UNAVAILABLE
        stopping.join(30)
        assert not stopping.is_alive()


def test_the_wait_of_a_streams_request_for_room_counts_in_its_timeout_and_its_latency() -> None:
    gate = Gate()
    model = LoopbackModel(run=gate, max_batch_size=1, max_queue=1)
    with serving(model) as served:
        before = served.stub("ModelStreamInfer")(forty("echo"), timeout=60)
        until(lambda: len(model.seen) == 3)  # one runs, one waits in the queue, one for room
        late = infer_request(x=X[:1])
        late.parameters["timeout"].int64_param = 50_000
        stream = served.stub("ModelStreamInfer")(iter([late]), timeout=60)
        until(lambda: len(model.seen) == 4)
        (answer,) = stream
        assert "deadline" in answer.error_message
        gate.go.set()
        assert len(list(before)) == 40
        (seen,) = [each for each in served.log.observations if each.code == "DEADLINE_EXCEEDED"]
        assert seen.seconds >= 0.05


def test_a_stream_that_drains_answers_the_request_that_waits_for_room() -> None:
    gate = Gate()
    model = LoopbackModel(run=gate, max_batch_size=1, max_queue=1)
    with serving(model) as served:
        stream = served.stub("ModelStreamInfer")(forty("echo"), timeout=60)
        until(lambda: len(model.seen) == 3)  # one runs, one waits in the queue, one for room
        stopping = threading.Timer(0, served.transport.stop, (300.0,))
        stopping.start()
        until(served.reports_draining)
        gate.go.set()
        assert [next(stream).error_message for _ in range(3)] == [""] * 3
        with pytest.raises(grpc.RpcError, match="shutting down"):
            next(stream)
        stopping.join(30)


def test_no_more_than_the_window_is_read_ahead() -> None:
    gate = Gate()
    model = LoopbackModel(run=gate)
    with serving(model, stream_window=3) as served:
        answers = served.stub("ModelStreamInfer")(forty("echo"), timeout=60)
        until(lambda: len(model.seen) == 3)
        stays(lambda: len(model.seen) == 3, 0.1, "no more is read")
        gate.go.set()
        assert len(list(answers)) == 40


def test_a_request_that_cannot_be_parsed_ends_the_stream_after_the_responses_before_it(served: Served) -> None:
    open_stream: Any = served.channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
    answers = open_stream(iter([numbered(1).SerializeToString(), b"\xff" * 50]), timeout=30)
    assert pb.ModelStreamInferResponse.FromString(next(answers)).infer_response.id == "1"
    with pytest.raises(grpc.RpcError, match="cannot be parsed"):
        next(answers)
