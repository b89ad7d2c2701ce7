"""A server of several worker processes, as clients see it: responses are complete, dead workers are replaced."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from artifacts import write_mlp
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import infer_request
from serverprocess import Serve, ServerProcess
from waiting import until
from workerprocesses import Client, alive, listening, pids, wait_replaced

from bf16kit.protocol import inference_pb2 as pb

pytestmark = pytest.mark.long  # starts servers of several processes, and kills them

ROWS = np.random.default_rng(0).standard_normal((1, 16)).astype(np.float32)


def infer(client: Client) -> bytes:
    answer: bytes = client.call("ModelInfer", infer_request("mlp", x=ROWS)).raw_output_contents[0]
    return answer


def ready(client: Client) -> tuple[bool, bool, int]:
    """Return ServerReady, ModelReady, and the health of the model."""
    health: Any = health_pb2_grpc.HealthStub(client.channel)
    return (
        client.call("ServerReady", pb.ServerReadyRequest()).ready,
        client.call("ModelReady", pb.ModelReadyRequest(name="mlp")).ready,
        health.Check(health_pb2.HealthCheckRequest(service="mlp"), timeout=30).status,
    )


def outcome(client: Client, expected: bytes) -> str:
    """Ask for a response and for readiness; return "right", "wrong", or the name of the status."""
    try:
        return "right" if infer(client) == expected and ready(client) == READY else "wrong"
    except grpc.RpcError as error:
        return str(error.code().name)


def watch(client: Client, told: list[int]) -> None:
    """Append the updates of the model's health, until the connection ends."""
    health: Any = health_pb2_grpc.HealthStub(client.channel)
    with suppress(grpc.RpcError):
        told.extend(update.status for update in health.Watch(health_pb2.HealthCheckRequest(service="mlp")))


IN_FLIGHT = 'bf16kit_requests_in_flight{model="mlp",version="1"}'
READY = (True, True, health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_mlp(tmp_path / "models" / "mlp" / "1")
    return tmp_path / "models"


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yield a server with two workers, for tests that leave it as it was: ready, with two workers."""
    repository = tmp_path_factory.mktemp("lasting")
    write_mlp(repository / "mlp" / "1")
    ports = ("--grpc-port", "0", "--http-port", "0")
    server = ServerProcess("--repository", str(repository), "--workers", "2", *ports)
    yield server.wait_ready()
    server.close()


@pytest.fixture
def clients(lasting: ServerProcess) -> Iterator[list[Client]]:
    """Yield so many connections that both workers have some: one of them had none once in 16,384 tests."""
    with ExitStack() as stack:
        made = [Client(lasting.target) for _ in range(15)]
        for client in made:
            stack.enter_context(client.channel)
        yield made


def test_all_workers_send_equal_responses_and_report_the_server_as_ready(
    lasting: ServerProcess, clients: list[Client]
) -> None:
    assert len(pids(lasting)) == 2
    assert len({infer(client) for client in clients}) == 1
    until(lambda: {ready(client) for client in clients} == {READY})


def test_a_killed_worker_affects_only_its_own_connections_and_is_replaced(
    lasting: ServerProcess, clients: list[Client]
) -> None:
    """Its clients may get UNAVAILABLE. No new client can reach it, so the server stays ready, for watchers as well."""
    expected, stop = infer(clients[0]), threading.Event()
    outcomes: dict[Client, set[str]] = {client: set() for client in clients[:10]}
    watched: list[list[int]] = [[] for _ in clients]

    def work(client: Client) -> None:
        while not stop.is_set():
            outcomes[client].add(outcome(client, expected))

    until(lambda: {ready(client) for client in clients} == {READY})
    watching = [threading.Thread(target=watch, args=each) for each in zip(clients, watched, strict=True)]
    working = [threading.Thread(target=work, args=[client]) for client in outcomes]
    for thread in (*watching, *working):
        thread.start()
    until(lambda: all(watched), what="the first update of every stream")
    victim, other = pids(lasting)
    os.kill(victim, signal.SIGKILL)

    def replaced() -> bool:
        assert lasting.get("/readyz")[0] == 200
        return victim not in pids(lasting) and listening(lasting) == 2

    until(replaced, 120, "another worker in place of the dead one")
    stop.set()
    for thread in working:
        thread.join(60)
    assert {infer(client) for client in clients} == {expected}
    for client in clients:
        client.channel.close()
    for thread in watching:
        thread.join(60)
    assert set().union(*outcomes.values()) <= {"right", "UNAVAILABLE"}
    assert {"right"} in outcomes.values(), "only the connections of the dead one were cut"
    assert other in pids(lasting)
    assert watched == [[health_pb2.HealthCheckResponse.SERVING]] * len(clients), "no other update was sent"


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
    server = serve("--repository", str(repository), "--workers", "2").wait_ready()
    client = Client(server.target)
    with client.channel:
        assert infer(client)
    assert "has ended" not in server.log


def test_the_port_is_in_use_until_the_supervisor_is_killed_which_leaves_no_worker_behind(
    repository: Path, serve: Serve
) -> None:
    server = serve("--repository", str(repository), "--workers", "2").wait_ready()
    workers, port = pids(server), server.ports()[0]
    second = serve("--repository", str(repository), "--workers", "2", "--grpc-port", str(port))
    assert second.exit_code() == 2
    assert f"port {port} on 127.0.0.1 is in use by another program" in second.log
    os.kill(server.process.pid, signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in workers), what="the end of the workers")
    serve("--repository", str(repository), "--workers", "2", "--grpc-port", str(port)).wait_ready()


def test_sigterm_finishes_the_requests_in_flight_in_every_worker(repository: Path, serve: Serve) -> None:
    """The queue waits two seconds for a fuller batch, which keeps a request of each connection in flight.

    systemd sends SIGTERM and a terminal sends SIGINT to every process; only the supervisor must react.
    """
    (repository / "mlp" / "serving.yaml").write_text("max_queue_delay_ms: 2000\n")
    server = serve("--repository", str(repository), "--workers", "2").wait_ready()
    workers = pids(server)
    with ExitStack() as stack:
        made = [Client(server.target) for _ in range(10)]
        for client in made:
            stack.enter_context(client.channel)
            client.call("ServerLive", pb.ServerLiveRequest())
        started = [client.ask("ModelInfer").future(infer_request("mlp", x=ROWS), timeout=60) for client in made]
        until(lambda: server.metric(IN_FLIGHT) == len(made), what="all of them at work")
        for pid in workers:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        server.terminate()
        assert server.exit_code() == 0
        ends = {call.code() for call in started}
    assert ends == {grpc.StatusCode.OK}
    assert "requests were cut off" not in server.log
    assert "has ended" not in server.log
    assert not any(alive(pid) for pid in workers)


def test_requests_that_outlast_the_drain_are_cut_off_and_the_exit_code_says_so(repository: Path, serve: Serve) -> None:
    (repository / "mlp" / "serving.yaml").write_text("max_queue_delay_ms: 60000\n")
    env = {**os.environ, "BF16KIT_DRAIN_SECONDS": "0.5"}
    server = serve("--repository", str(repository), "--workers", "2", env=env).wait_ready()
    client = Client(server.target)
    with client.channel:
        call = client.ask("ModelInfer").future(infer_request("mlp", x=ROWS))  # a deadline would make it run earlier
        until(lambda: server.metric(IN_FLIGHT) == 1)
        server.terminate()
        assert server.exit_code() == 1, server.log
        assert call.code() is not grpc.StatusCode.OK
    assert "requests were cut off: still in flight after 0.5 s" in server.log
