"""A server of several worker processes, as clients see it: responses are complete, dead workers are replaced."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from artifacts import write_mlp, write_product
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import infer_request
from serverprocess import Serve, ServerProcess
from waiting import until
from workerprocesses import Client, alive, is_replaced, pids, several, wait_replaced

from bf16kit.protocol import inference_pb2 as pb
from bf16kit.runtime.ort.kernel import LIBRARY
from bf16kit.service.drift.sampler import BURST_S

pytestmark = pytest.mark.long  # starts servers of several processes, and kills them

ROWS = np.random.default_rng(0).standard_normal((1, 16)).astype(np.float32)
SERVING = health_pb2.HealthCheckResponse.SERVING


def ready(client: Client) -> tuple[bool, bool, int]:
    """Return ServerReady, ModelReady, and the health of the model."""
    health: Any = health_pb2_grpc.HealthStub(client.channel)
    return (
        client.call("ServerReady", pb.ServerReadyRequest()).ready,
        client.call("ModelReady", pb.ModelReadyRequest(name="mlp")).ready,
        health.Check(health_pb2.HealthCheckRequest(service="mlp"), timeout=30).status,
    )


READY = (True, True, SERVING)


def outcome(client: Client, expected: bytes) -> str:
    """Ask for a response and for readiness; return "right", "wrong", or the name of the status."""
    try:
        return "right" if client.infer(x=ROWS) == expected and ready(client) == READY else "wrong"
    except grpc.RpcError as error:
        return str(error.code().name)


def watch(client: Client, told: list[int]) -> None:
    """Append the updates of the model's health, until the connection ends."""
    health: Any = health_pb2_grpc.HealthStub(client.channel)
    with suppress(grpc.RpcError):
        told.extend(update.status for update in health.Watch(health_pb2.HealthCheckRequest(service="mlp")))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_mlp(tmp_path / "models" / "mlp" / "1")
    return tmp_path / "models"


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yield a server with two workers, for tests that leave it as it was: ready, with two workers."""
    repository = tmp_path_factory.mktemp("lasting")
    write_mlp(repository / "mlp" / "1")
    with ServerProcess("--repository", repository, "--workers", "2") as server:
        yield server.wait_ready()


@pytest.fixture
def clients(lasting: ServerProcess) -> Iterator[list[Client]]:
    with several(lasting) as clients:
        until(lambda: {ready(client) for client in clients} == {READY})
        yield clients


def test_a_killed_worker_affects_only_its_own_connections_and_is_replaced(
    lasting: ServerProcess, clients: list[Client]
) -> None:
    """Its clients may get UNAVAILABLE. No new client can reach it, so the server stays ready, for watchers as well."""
    (expected,) = {client.infer(x=ROWS) for client in clients}
    stop = threading.Event()
    outcomes: dict[Client, set[str]] = {client: set() for client in clients[:10]}
    watched: list[list[int]] = [[] for _ in clients]

    def work(client: Client) -> None:
        while not stop.is_set():
            outcomes[client].add(outcome(client, expected))

    watching = [threading.Thread(target=watch, args=each) for each in zip(clients, watched, strict=True)]
    working = [threading.Thread(target=work, args=[client]) for client in outcomes]
    for thread in (*watching, *working):
        thread.start()
    until(lambda: all(watched), what="the first update of every stream")
    victim, other = pids(lasting)
    os.kill(victim, signal.SIGKILL)

    def replaced() -> bool:
        assert lasting.get("/readyz")[0] == 200
        return is_replaced(lasting, victim)

    until(replaced, 120, "another worker in place of the dead one")
    stop.set()
    for thread in working:
        thread.join(60)
    assert {client.infer(x=ROWS) for client in clients} == {expected}
    for client in clients:
        client.channel.close()
    for thread in watching:
        thread.join(60)
    assert set().union(*outcomes.values()) <= {"right", "UNAVAILABLE"}
    assert {"right"} in outcomes.values(), "only the connections of the dead one were cut"
    assert other in pids(lasting)
    assert watched == [[SERVING]] * len(clients), "no other update was sent"


def test_a_server_without_any_worker_is_not_ready(lasting: ServerProcess, clients: list[Client]) -> None:
    victims = pids(lasting)
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    until(lambda: lasting.get("/readyz")[0] == 503, what="not ready")
    wait_replaced(lasting, *victims)
    until(lambda: lasting.get("/readyz")[0] == 200, 60, "ready again")
    until(lambda: {ready(client) for client in clients} == {READY}, what="ready, says everyone")


def test_a_model_with_more_labels_than_a_message_may_have_is_served_by_all_workers(
    repository: Path, serve: Serve
) -> None:
    (repository / "mlp" / "serving.yaml").write_text("labels: {y: labels.txt}\n")
    # Each byte takes seven in a message.
    (repository / "mlp" / "labels.txt").write_text(f"{chr(1) * 999}\n" * 10_000 + "last\n")
    server = serve("--repository", repository, "--workers", "2").wait_ready()
    with Client(server.target) as client:
        assert client.infer(x=ROWS)
    assert "has ended" not in server.log


def test_the_port_is_in_use_until_the_supervisor_is_killed_which_leaves_no_worker_behind(
    repository: Path, serve: Serve
) -> None:
    server = serve("--repository", repository, "--workers", "2").wait_ready()
    workers, port = pids(server), server.ports()[0]
    second = serve("--repository", repository, "--workers", "2", "--grpc-port", str(port))
    assert second.exit_code() == 2
    assert f"port {port} on 127.0.0.1 is in use by another program" in second.log
    os.kill(server.process.pid, signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in workers), what="the end of the workers")
    serve("--repository", repository, "--workers", "2", "--grpc-port", str(port)).wait_ready()


def test_sigterm_finishes_the_requests_in_flight_in_every_worker(repository: Path, serve: Serve) -> None:
    """The queue waits two seconds for a fuller batch, which keeps a request of each connection in flight.

    systemd sends SIGTERM and a terminal sends SIGINT and SIGHUP to every process; only the supervisor must react.
    """
    (repository / "mlp" / "serving.yaml").write_text("max_queue_delay_ms: 2000\n")
    server = serve("--repository", repository, "--workers", "2").wait_ready()
    workers = pids(server)
    with several(server, 10) as clients:
        for client in clients:
            client.call("ServerLive", pb.ServerLiveRequest())
        started = [client.ask("ModelInfer").future(infer_request("mlp", x=ROWS), timeout=60) for client in clients]
        until(lambda: server.of_model("requests_in_flight") == len(clients), what="all of them at work")
        for pid in workers:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(pid, number)
        server.stop()
        assert {call.code() for call in started} == {grpc.StatusCode.OK}
    assert "requests were cut off" not in server.log
    assert "has ended" not in server.log
    assert not any(alive(pid) for pid in workers)


def weights_of(server: ServerProcess) -> list[list[str]]:
    """Return the shared memory of weights that each worker maps, as inode numbers."""
    maps = [Path(f"/proc/{pid}/maps").read_text().splitlines() for pid in pids(server)]
    return [sorted({line.split()[4] for line in lines if "memfd:bf16kit-weights" in line}) for lines in maps]


@pytest.mark.parametrize("kernel", ["", "off"])
def test_all_workers_share_one_copy_of_the_weights_which_outlives_the_one_that_filled_it(
    tmp_path: Path, serve: Serve, kernel: str
) -> None:
    """Without the kernel, ONNX Runtime copies the weights in each worker, and all serve too."""
    if not kernel and not LIBRARY.exists():
        pytest.skip("the kernel was not built: no C++17 compiler")
    write_product(tmp_path / "product" / "1", width=512)
    x = np.linspace(-1, 1, 512, dtype=np.float32).reshape(1, 512)
    server = serve("--repository", tmp_path, "--workers", "2", env={"BF16KIT_KERNEL_PATH": kernel}).wait_ready()
    with several(server) as clients:
        (expected,) = {client.infer("product", x=x) for client in clients}
    if kernel == "off":
        return
    copy, same = weights_of(server)
    assert copy == same
    assert len(copy) == 1
    for killed in pids(server):
        os.kill(killed, signal.SIGKILL)
        wait_replaced(server, killed)
        server.wait_ready()
        assert weights_of(server) == [copy, copy]
    with several(server) as clients:
        assert {client.infer("product", x=x) for client in clients} == {expected}


def test_the_sampling_rate_limits_the_whole_server_not_each_worker(repository: Path, serve: Serve) -> None:
    """Three workers choose 0.8 requests a second each, and one a second is measured after the first burst."""
    (repository / "mlp" / "serving.yaml").write_text("shadow: {rate: 1.0, max_per_second: 1}\n")
    server = serve("--repository", repository, "--workers", "3").wait_ready()

    def samples(outcome: str) -> float:
        return server.of_model("drift_samples_total", outcome=outcome)

    begun = time.monotonic()
    while time.monotonic() < begun + 8 or not samples("dropped"):
        with several(server, 6) as clients:
            for client in clients:
                client.infer(x=ROWS)
    until(lambda: samples("measured") > 0, 60, "the rest measured")
    assert samples("measured") <= BURST_S + time.monotonic() - begun
