"""ModelStreamInfer over a real socket: order, errors in the stream or as its status, batches, and cancelled streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import StatusCode
from loopback import Gate, LoopbackModel, Served, infer_request, serving, until

from bf16kit.protocol import inference_pb2 as pb

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(LoopbackModel()) as served:
        yield served


def numbered(number: int) -> pb.ModelInferRequest:
    message = infer_request(x=X)
    message.id = str(number)
    return message


def test_a_stream_responds_in_order_and_continues_after_an_error(served: Served) -> None:
    messages = [numbered(n) for n in range(5)]
    messages[2].inputs[0].datatype = "INT32"
    answers = list(served.stub("ModelStreamInfer")(iter(messages), timeout=30))
    assert [answer.infer_response.id for answer in answers] == ["0", "1", "2", "3", "4"]
    assert [bool(answer.error_message) for answer in answers] == [False, False, True, False, False]
    assert "expected FP32" in answers[2].error_message
    assert answers[4].infer_response.raw_output_contents[0] == X.tobytes()


def test_a_stream_ends_with_the_status_if_the_client_requests_it(served: Served) -> None:
    messages = [infer_request(x=X), infer_request("nobody", x=X), infer_request(x=X)]
    answers = served.stub("ModelStreamInfer")(iter(messages), timeout=30, metadata=[("triton_grpc_error", "true")])
    assert next(answers).infer_response.raw_output_contents[0] == X.tobytes()
    with pytest.raises(grpc.RpcError) as ended:
        next(answers)
    assert ended.value.code() is StatusCode.NOT_FOUND


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


def test_each_response_is_marked_final_if_the_client_requests_it(served: Served) -> None:
    message = infer_request(x=X)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    (answer,) = served.stub("ModelStreamInfer")(iter([message]), timeout=30)
    assert answer.infer_response.parameters["triton_final_response"].bool_param


def test_streams_beyond_max_streams_are_rejected() -> None:
    with serving(LoopbackModel(), max_streams=1) as served:
        stay = threading.Event()

        def messages() -> Iterator[pb.ModelInferRequest]:
            yield infer_request(x=X)
            stay.wait(60)

        first = served.stub("ModelStreamInfer")(messages(), timeout=60)
        next(first)
        with pytest.raises(grpc.RpcError) as refused:
            next(served.stub("ModelStreamInfer")(iter([infer_request(x=X)]), timeout=30))
        assert refused.value.code() is StatusCode.RESOURCE_EXHAUSTED
        assert "1 open streams is the limit" in (refused.value.details() or "")
        first.cancel()
        stay.set()


def test_a_cancelled_stream_frees_its_place() -> None:
    with serving(LoopbackModel(), max_streams=1) as served:
        stay = threading.Event()

        def messages() -> Iterator[pb.ModelInferRequest]:
            yield infer_request(x=X)
            stay.wait(60)

        for _ in range(3):
            stream = until(lambda: _opened(served, messages()))
            stream.cancel()
        stay.set()


def _opened(served: Served, messages: Iterator[pb.ModelInferRequest]) -> Any:
    stream = served.stub("ModelStreamInfer")(messages, timeout=60)
    try:
        next(stream)
    except grpc.RpcError:
        return None
    return stream


@contextmanager
def another_client(served: Served) -> Iterator[Served]:
    """Yield the server with a separate connection: channels of one process otherwise share theirs."""
    with grpc.insecure_channel(served.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield replace(served, channel=channel)


def forty(model: str) -> Iterator[pb.ModelInferRequest]:
    return iter([infer_request(model, x=X) for _ in range(40)])


def test_streams_to_a_stuck_model_do_not_delay_other_streams() -> None:
    """Ten streams of 16 requests in flight would take more than all threads that answer streams."""
    gate = Gate()
    with serving(LoopbackModel("stuck", run=gate), LoopbackModel(), max_in_flight=32, max_streams=16) as served:
        streams = [served.stub("ModelStreamInfer")(forty("stuck"), timeout=60) for _ in range(10)]
        assert gate.started.wait(30)
        turns = served.transport._services._servicer._scheduler
        until(lambda: turns._models.in_use == 28 and len(turns._waiting) == 10)  # all of them are held back
        with another_client(served) as other:
            answers = list(other.stub("ModelStreamInfer")(iter([numbered(n) for n in range(40)]), timeout=5))
        assert [answer.infer_response.id for answer in answers] == [str(n) for n in range(40)]
        gate.go.set()
        for stream in streams:
            assert not any(answer.error_message for answer in stream)  # held back, and none of them rejected
        assert turns._models.in_use == 0


def test_streams_of_one_connection_to_several_models_delay_no_other_connection() -> None:
    """Nor do later streams of that connection get the last places because their models have none yet."""
    gate = Gate()
    models = [LoopbackModel(f"stuck{n}", run=gate) for n in range(8)]
    with serving(*models, LoopbackModel(), max_in_flight=32, max_streams=16) as served:
        turns = served.transport._services._servicer._scheduler
        call = served.stub("ModelStreamInfer")
        streams = [call(forty(f"stuck{n}"), timeout=60) for n in range(4)]
        until(lambda: turns._clients.in_use == 28 and len(turns._waiting) == 4)
        streams += [call(forty(f"stuck{n}"), timeout=60) for n in range(4, 8)]
        until(lambda: len(turns._waiting) == 8)
        with another_client(served) as other:
            assert len(list(other.stub("ModelStreamInfer")(iter([numbered(0)]), timeout=5))) == 1
        for stream in streams:
            stream.cancel()
        gate.go.set()


def test_a_held_back_stream_ends_with_its_client_or_the_server() -> None:
    gate = Gate()
    with serving(LoopbackModel(run=gate), max_in_flight=8) as served:
        left, kept = (served.stub("ModelStreamInfer")(forty("echo"), timeout=60) for _ in range(2))
        turns = served.transport._services._servicer._scheduler
        until(lambda: len(turns._waiting) == 2)
        left.cancel()
        until(lambda: len(turns._waiting) == 1)
        stopping = threading.Timer(0, served.transport.stop, (300.0,))
        stopping.start()
        until(lambda: not turns._waiting)
        gate.go.set()
        with pytest.raises(grpc.RpcError) as ended:
            list(kept)
        assert ended.value.code() is StatusCode.UNAVAILABLE
        stopping.join(30)
        assert not stopping.is_alive()


def test_the_wait_of_a_streams_request_for_its_turn_counts_in_its_timeout_and_its_latency() -> None:
    gate = Gate()
    with serving(LoopbackModel(run=gate), max_in_flight=8) as served:
        before = served.stub("ModelStreamInfer")(forty("echo"), timeout=60)
        turns = served.transport._services._servicer._scheduler
        until(lambda: turns._waiting)
        late = infer_request(x=X)
        late.parameters["timeout"].int64_param = 50_000
        stream = served.stub("ModelStreamInfer")(iter([late]), timeout=60)
        until(lambda: len(turns._waiting) == 2)
        timed_out = time.monotonic() + 0.05
        until(lambda: time.monotonic() > timed_out)
        gate.go.set()
        (answer,) = stream
        assert "deadline" in answer.error_message
        assert len(list(before)) == 40
        (seen,) = [each for each in served.log.observations if each.code == "DEADLINE_EXCEEDED"]
        assert seen.seconds >= 0.05
