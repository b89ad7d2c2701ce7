"""The server as a whole: its port, its limits, and how it stops."""

import re
import socket
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import (
    SOME_TOKEN,
    Gate,
    LoopbackModel,
    LoopbackRegistry,
    RequestLog,
    SlowTokens,
    infer_request,
    serving,
)
from packaging.specifiers import SpecifierSet
from rawgrpc import RawConnection
from waiting import until

from bf16kit.messages.errors import ConfigError
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.grpc import arrival
from bf16kit.service.grpc.handlers import SERVICE
from bf16kit.service.grpc.transport import Transport, TransportOptions

X = np.ones((2, 3), np.float32)


def start(**options: object) -> int:
    """Start a server that is expected to fail. Stop it if it does not."""
    server = Transport(LoopbackRegistry([]), RequestLog().refused, TransportOptions(**options))  # type: ignore[arg-type]
    try:
        return server.start()
    finally:
        server.stop(0)


def test_the_error_for_an_address_of_another_machine_names_it() -> None:
    with pytest.raises(ConfigError, match=re.escape("cannot listen on 203.0.113.7 port ")):
        start(host="203.0.113.7", port=0)


def test_a_message_over_the_limit_is_rejected() -> None:
    with serving(LoopbackModel(max_batch_size=0), max_message_bytes=1 << 20) as served:
        assert served.call("ModelInfer", infer_request(x=np.zeros((1000, 3), np.float32)))
        code, _ = served.refusal("ModelInfer", infer_request(x=np.zeros((100_000, 3), np.float32)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_stopping_does_not_wait_for_watches_and_idle_streams() -> None:
    with serving(LoopbackModel()) as served:
        stay = threading.Event()

        def messages() -> Iterator[pb.ModelInferRequest]:
            yield infer_request(x=X)
            stay.wait(60)

        stream = served.stub("ModelStreamInfer")(messages(), timeout=60)
        next(stream)
        health: Any = health_pb2_grpc.HealthStub(served.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        next(watch)
        served.transport.stop(grace=3600)
        list(watch)  # the watch ends without an error
        with pytest.raises(grpc.RpcError) as ended:
            next(stream)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        stay.set()


@pytest.mark.long
@pytest.mark.alone  # the test assumes how far gRPC's one thread gets in half a second
def test_calls_that_have_arrived_when_the_server_stops_are_rejected_not_cancelled() -> None:
    """A client may safely repeat a rejected call. This must hold even if gRPC's one thread is behind with the calls."""
    tokens = SlowTokens(lambda: sum(range(300_000)))  # one uninterrupted call: no other thread runs meanwhile
    gate = Gate()
    with serving(LoopbackModel(run=gate), tokens=tokens, max_delivery_seconds=30.0) as served:  # for a busy machine
        infer = served.stub("ModelInfer")
        calls = [infer.future(infer_request(x=X), metadata=SOME_TOKEN) for _ in range(81)]
        assert gate.started.wait(30)
        threading.Timer(0.5, gate.go.set).start()
        assert served.transport.stop(20)
        codes = Counter(call.code() for call in calls)  # whichever came first runs
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}, codes
    assert codes[grpc.StatusCode.UNAVAILABLE] > 10, "all had been let in before: the test tells nothing"


def test_stopping_does_not_wait_for_a_run_beyond_its_grace() -> None:
    gate = Gate()
    with serving(LoopbackModel(run=gate)) as served:
        running = served.stub("ModelInfer").future(infer_request(x=X))
        assert gate.started.wait(30)
        begun = time.monotonic()
        clean = served.transport.stop(0.1)
        took = time.monotonic() - begun
        gate.go.set()
        assert not clean
        assert took < 10
        assert running.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


@pytest.mark.long
@pytest.mark.parametrize("grace", [2, 25])
@pytest.mark.parametrize("client", ["does not take its answer", "sends headers only"])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_stop_waits_seconds_or_half_of_its_time_for_an_inactive_client_and_is_clean(
    client: str, method: str, grace: float
) -> None:
    with serving(LoopbackModel()) as served, RawConnection(served.port, window=0) as idle:
        takes = client == "does not take its answer"
        stream = idle.call(f"/{SERVICE}/{method}", infer_request(x=X).SerializeToString() if takes else None)
        pools = served.transport.pools
        until(lambda: served.log.seen if takes else any(pools[n].shares.in_use for n in ("inference", "streams")))
        begun = time.monotonic()
        assert served.transport.stop(grace)
        assert time.monotonic() - begun < 10
        until(lambda: stream in idle.ended or idle.closed)


@pytest.mark.long
def test_a_stop_gives_requests_in_flight_its_whole_time() -> None:
    gate = Gate()
    with serving(LoopbackModel(run=gate)) as served, RawConnection(served.port, window=0) as deaf:
        deaf.call(f"/{SERVICE}/ModelInfer")
        running = served.stub("ModelInfer").future(infer_request(x=X), timeout=30)
        assert gate.started.wait(30)
        threading.Timer(2.5, gate.go.set).start()
        assert served.transport.stop(grace=4)
        assert running.result().raw_output_contents[0] == X.tobytes()


def test_a_stop_does_not_wait_for_a_client_that_does_not_reply_to_pings() -> None:
    """gRPC sends a ping to learn whether its GOAWAY has arrived."""
    with serving(LoopbackModel()) as served, RawConnection(served.port, answers_pings=False) as gone:
        stream = gone.call(f"/{SERVICE}/ModelInfer", infer_request(x=X).SerializeToString())
        until(lambda: stream in gone.ended)
        begun = time.monotonic()
        assert served.transport.stop(grace=30)
        assert time.monotonic() - begun < 15
        until(lambda: gone.closed)


def test_a_server_that_has_stopped_has_no_thread_and_no_port_and_may_be_stopped_again() -> None:
    before = set(threading.enumerate())
    with serving(LoopbackModel()) as served:
        served.call("ModelInfer", infer_request(x=X))
        list(served.stub("ModelStreamInfer")(iter([infer_request(x=X)])))
        ours = [t for t in threading.enumerate() if t not in before and t.name.startswith(("grpc", "health"))]
        assert ours
        assert served.transport.stop(30)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", served.port), timeout=10)
        assert not any(thread.is_alive() for thread in ours)


def test_health_checks_do_not_wait_behind_inferences_that_grpc_has_not_delivered() -> None:
    begun, delivered = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        begun.set()
        assert delivered.acquire(timeout=30)

    with serving(LoopbackModel(), tokens=SlowTokens(wait)) as served:
        infer = served.stub("ModelInfer")
        inferences = [infer.future(infer_request(x=X), metadata=SOME_TOKEN) for _ in range(100)]
        assert begun.wait(30)
        with grpc.insecure_channel(served.address, options=[("grpc.use_local_subchannel_pool", 1)]) as another:
            grpc.channel_ready_future(another).result(30)
            stub: Any = health_pb2_grpc.HealthStub(another)
            check = stub.Check.future(health_pb2.HealthCheckRequest())
            time.sleep(0.2)  # by then all of them have arrived, which gRPC does not show
            delivered.release(5)
            assert check.result(20).status == health_pb2.HealthCheckResponse.SERVING
        delivered.release(95)
        for inference in inferences:
            assert inference.result(30)


def test_the_packages_bounds_are_the_versions_with_early_admission() -> None:
    """A version outside of them would be installed, and the server would not start."""
    project = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text("utf-8"))["project"]
    (needed,) = [each for each in project["dependencies"] if re.match(r"grpcio[<>=]", each)]
    minors = [minor for minor in range(200) if SpecifierSet(needed.removeprefix("grpcio")).contains(f"1.{minor}.0")]
    assert minors == list(arrival.VERSIONS)
