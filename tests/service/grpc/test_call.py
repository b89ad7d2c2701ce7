"""One call over a real socket: where it is admitted or rejected, and what it releases when it ends."""

import gc
import gzip
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from loopback import Gate, LoopbackModel, infer_request, serving
from rawgrpc import RawConnection, framed
from waiting import stays, until

from bf16kit.messages.errors import ConfigError
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.grpc import arrival
from bf16kit.service.grpc.call import Call
from bf16kit.service.grpc.handlers import SERVICE

X = np.ones((1, 3), np.float32)
MESSAGE = infer_request(x=X).SerializeToString()
LARGE = infer_request(x=np.ones((4096, 3), np.float32)).SerializeToString()
LIVE = pb.ServerLiveRequest()
INFER = f"/{SERVICE}/ModelInfer"


def test_a_grpcio_whose_calls_cannot_be_admitted_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "SUPPORTED", False)
    with (
        pytest.raises(ConfigError, match=rf"grpcio is {grpc.__version__}; this server needs 1\.82 to 1\.85"),
        serving(LoopbackModel()),
    ):
        pass


def test_a_call_takes_no_thread_before_its_request_is_there() -> None:
    with serving(LoopbackModel()) as served:
        before = threading.active_count()
        with RawConnection(served.port) as silent:
            streams = [silent.call(INFER) for _ in range(50)]
            served.call("ModelInfer", infer_request(x=X))
            assert threading.active_count() - before < 5
            for stream in streams:
                silent.data(stream, framed(MESSAGE))
            until(lambda: silent.ended.issuperset(streams))
    assert [code for *_, code in served.log.seen] == ["OK"] * 51


def test_neither_a_small_request_nor_a_rejected_call_takes_a_thread_of_a_pool() -> None:
    gate = Gate()
    before = set(threading.enumerate())
    with serving(LoopbackModel(run=gate), max_in_flight=1) as served, RawConnection(served.port) as client:
        running = served.stub("ModelInfer").future(infer_request(x=X))
        assert gate.started.wait(30)
        for _ in range(20):
            assert served.refusal("ModelInfer", infer_request(x=X))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        stream = client.call(INFER)
        until(lambda: stream in client.ended)  # the client has a response and has sent nothing of the message
        assert not [t for t in threading.enumerate() if t not in before and t.name.startswith("grpc-infer")]
        assert served.log.refusals == ["in_flight"] * 21
        gate.go.set()
        running.result(30)


@pytest.mark.parametrize("message", [LARGE, gzip.compress(MESSAGE)], ids=["large", "compressed"])
def test_what_takes_long_to_decode_is_decoded_on_another_thread_than_grpcs(message: bytes) -> None:
    before = set(threading.enumerate())
    with serving(LoopbackModel(max_batch_size=8192)) as served:
        call: Any = served.channel.unary_unary(INFER)
        call(message, timeout=30)
        assert [t for t in threading.enumerate() if t not in before and t.name.startswith("grpc-infer")]
    assert [code for *_, code in served.log.seen] == ["OK"]


@pytest.mark.parametrize(
    ("path", "messages"), [(INFER, [b"\xff" * 50]), ("/grpc.health.v1.Health/Check", [b"\x0a\xff"]), (INFER, [])]
)
def test_bytes_that_cannot_be_parsed_or_no_request_are_an_invalid_argument(path: str, messages: list[bytes]) -> None:
    with serving(LoopbackModel()) as served:
        call: Any = served.channel.stream_unary(path)
        with pytest.raises(grpc.RpcError) as refused:
            call(iter(messages), timeout=30)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_call_without_a_thread_is_cancelled_and_the_server_continues() -> None:
    with serving(LoopbackModel(max_batch_size=8192)) as served:
        for pool in served.transport.pools.values():
            pool.shutdown()
        for name, message in (("ModelInfer", pb.ModelInferRequest.FromString(LARGE)), ("ServerLive", LIVE)):
            assert served.refusal(name, message)[0] is grpc.StatusCode.CANCELLED
        for name in ("inference", "control"):
            assert served.transport.pools[name].shares.wait_empty(0)


def test_a_request_whose_client_leaves_the_queue_frees_its_place_at_once_and_is_never_run() -> None:
    gate = Gate()
    model = LoopbackModel(run=gate, max_batch_size=0)
    with serving(model) as served:
        running = served.stub("ModelInfer").future(infer_request(x=X))
        assert gate.started.wait(30)
        waiting = served.stub("ModelInfer").future(infer_request(x=X))
        until(lambda: served.transport.pools["inference"].shares.in_use == 2)
        waiting.cancel()
        until(lambda: served.log.seen)
        assert served.transport.pools["inference"].shares.in_use == 1
        gate.go.set()
        assert running.result(30)
    assert model.calls == 1
    assert [code for *_, code in served.log.seen] == ["CANCELLED", "OK"]


def test_large_requests_that_wait_to_be_decoded_are_counted() -> None:
    with serving(LoopbackModel(max_batch_size=8192), max_request_bytes=3 * len(LARGE)) as served:
        pool, go = served.transport.pools["inference"], threading.Event()
        for _ in range(64):  # more than it has threads
            pool.run(lambda: go.wait(60))
        begun = [served.stub("ModelInfer").future(pb.ModelInferRequest.FromString(LARGE)) for _ in range(6)]
        until(lambda: served.log.refusals == ["bytes"] * 3)
        assert pool.budget.in_use == 3 * len(LARGE)
        for call in begun:
            call.cancel()
        until(lambda: pool.budget.in_use == 0)
        go.set()


@pytest.mark.parametrize("slow", ["receive", "send"])
def test_a_client_that_does_not_send_its_request_or_read_its_response_keeps_its_place_until_the_timeout(
    slow: str,
) -> None:
    timeout: dict[str, Any] = {f"{slow}_seconds": 0.5}
    with serving(LoopbackModel(), **timeout) as served, RawConnection(served.port, window=0) as client:
        stream, shares = client.call(INFER), served.transport.pools["inference"].shares
        client.data(stream, framed(MESSAGE)[: 10 if slow == "receive" else None])
        until(lambda: shares.in_use)
        until(lambda: stream in client.ended)
        until(lambda: shares.wait_empty(0))
        assert served.log.refusals == ["too_slow"]
        assert len(served.log.seen) == (slow == "send")


@pytest.mark.long
def test_a_client_that_leaves_as_its_call_begins_is_not_counted_as_too_slow() -> None:
    """gRPC may report that the client left before the call waits for its request."""
    with serving(LoopbackModel(), receive_seconds=1.0) as served:  # gRPC's report may take a part of it
        for _ in range(5):
            with RawConnection(served.port) as client:  # not by grpc: closing its channel may hang (grpc/grpc#20026)
                for _ in range(100):
                    client.reset(client.call(INFER, MESSAGE))
        stays(lambda: "too_slow" not in served.log.refusals, 1.3, "no client is too slow")


def test_an_idle_stream_is_ended_but_not_one_that_waits_for_its_response() -> None:
    gate = Gate()
    path = f"/{SERVICE}/ModelStreamInfer"
    with serving(LoopbackModel(run=gate), stream_idle_seconds=0.3) as served, RawConnection(served.port) as client:
        idle, waiting = client.call(path), client.call(path)
        client.data(waiting, framed(MESSAGE))
        assert gate.started.wait(30)
        until(lambda: idle in client.ended)
        assert waiting not in client.ended
        gate.go.set()
        until(lambda: waiting in client.ended)  # after its response this stream is idle too


def test_a_request_without_tensors_is_rejected_above_64_kib() -> None:
    with serving(LoopbackModel()) as served:
        code, details = served.refusal("ModelMetadata", pb.ModelMetadataRequest(name="n" * (64 << 10)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "expected at most 65536 for a ModelMetadataRequest" in details
        assert len(served.call("ModelInfer", infer_request(x=np.ones((8, 3), np.float32))).outputs) == 1


def test_a_stream_stops_reading_at_its_byte_limit_and_continues_after_a_response() -> None:
    gate = Gate()
    rows = np.ones((1 << 18, 3), np.float32)  # 3 MiB, and 3 MiB in the response
    model = LoopbackModel(run=gate, max_batch_size=len(rows))
    with serving(model, max_streams=1) as served:
        pool = served.transport.pools["streams"]
        answers = served.stub("ModelStreamInfer")(iter([infer_request(x=rows) for _ in range(6)]), timeout=60)
        assert gate.started.wait(30)
        until(lambda: len(model.seen) == 3)  # with two requests there is room for one more, with three there is not
        stays(lambda: (len(model.seen), pool.budget.in_use >> 20) == (3, 9), 0.2, "nothing more is read")
        gate.go.set()
        assert [answer.error_message for answer in answers] == [""] * 6
        until(lambda: pool.shares.wait_empty(0))
        assert pool.budget.in_use == 0


def test_a_stream_that_waits_for_room_ends_with_its_client() -> None:
    gate = Gate()
    rows = np.ones((1 << 20, 3), np.float32)
    model = LoopbackModel(run=gate, max_batch_size=len(rows))
    with serving(model, max_in_flight=1, max_streams=1) as served:  # threads for one reader and one response
        stream = served.stub("ModelStreamInfer")(iter([infer_request(x=rows) for _ in range(3)]), timeout=60)
        assert gate.started.wait(30)
        time.sleep(0.2)  # by now the reader waits, which nothing shows; if it does not yet, the test still passes
        stream.cancel()
        until(lambda: served.transport.pools["streams"].shares.wait_empty(0))
        gate.go.set()
        assert served.transport.pools["streams"].budget.in_use == 0
        stay = threading.Event()

        def open_end() -> Iterator[pb.ModelInferRequest]:
            yield infer_request(x=X)
            stay.wait(60)  # the reader keeps one of the two threads

        assert next(served.stub("ModelStreamInfer")(open_end(), timeout=30)).infer_response.model_name == "echo"
        stay.set()


@pytest.mark.long
def test_a_call_that_has_ended_is_freed_without_a_collection_of_garbage() -> None:
    """gRPC keeps the stream of a call, some 10 KB, as long as Python has the call."""

    def calls() -> int:
        return sum(issubclass(type(each), Call) for each in gc.get_objects())

    with serving(LoopbackModel(), max_watches=0) as served:
        watch: Any = served.channel.unary_stream("/grpc.health.v1.Health/Watch")
        served.call("ModelInfer", infer_request(x=X))
        gc.collect()
        gc.disable()
        try:
            before = calls()
            for _ in range(20):
                served.call("ModelInfer", infer_request(x=X))
                served.refusal("ModelInfer", infer_request("nobody", x=X))
                assert served.call("ServerLive", pb.ServerLiveRequest()).live
                with pytest.raises(grpc.RpcError, match="health watches is the limit"):
                    next(watch(b"", timeout=30))
            until(lambda: calls() <= before)
        finally:
            gc.enable()
