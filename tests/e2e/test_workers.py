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
import onnx
import pytest
from artifacts import write_mlp
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import infer_request
from serverprocess import Serve, ServerProcess
from waiting import until
from workerprocesses import Client, alive, listening, pids, wait_replaced

import graphs
from bf16kit.protocol import inference_pb2 as pb
from converter.cli import run

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


IN_FLIGHT = 'bf16kit_requests_in_flight{model="mlp",version="1"}'
READY = (True, True, health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_mlp(tmp_path / "models" / "mlp" / "1")
    return tmp_path / "models"


@pytest.fixture(scope="module")
def converted_mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository of one model with both profiles that a CPU may serve."""
    directory = tmp_path_factory.mktemp("both")
    onnx.save(graphs.mlp((64, 96, 64)), directory / "m.onnx")
    target = directory / "models" / "mlp" / "1"
    assert run(["checkpoint", str(directory / "m.onnx"), "--out", str(target), "--format", "onnx", "--no-report"]) == 0
    return directory / "models"


@pytest.fixture
def server(repository: Path, serve: Serve) -> ServerProcess:
    return serve("--repository", str(repository), "--workers", "2").wait_ready()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yield a server with two workers, for tests that leave it as it was: ready, with two workers."""
    repository = tmp_path_factory.mktemp("lasting")
    write_mlp(repository / "mlp" / "1")
    env = {**os.environ, "BF16KIT_SHARED_MEMORY": "workers"}
    ports = ("--grpc-port", "0", "--http-port", "0")
    server = ServerProcess("--repository", str(repository), "--workers", "2", *ports, env=env)
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


@pytest.mark.long
def test_all_workers_send_equal_responses_and_report_the_server_as_ready(
    lasting: ServerProcess, clients: list[Client]
) -> None:
    assert len(pids(lasting)) == 2
    assert len({infer(client) for client in clients}) == 1
    until(lambda: {ready(client) for client in clients} == {READY})


@pytest.mark.long
def test_a_killed_worker_affects_only_its_own_connections_and_is_replaced(
    lasting: ServerProcess, clients: list[Client]
) -> None:
    """Clients of the killed worker may get UNAVAILABLE."""
    expected = infer(clients[0])
    stop, failed, wrong = threading.Event(), set[int](), list[object]()

    def work(number: int) -> None:
        while not stop.is_set():
            try:
                if infer(clients[number]) != expected:
                    wrong.append(number)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    failed.add(number)
                else:
                    wrong.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(10)]
    for thread in threads:
        thread.start()
    victim, other = pids(lasting)
    os.kill(victim, signal.SIGKILL)
    wait_replaced(lasting, victim)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert failed < set(range(10)), "only the connections of the dead one were cut"
    assert other in pids(lasting)
    assert {infer(client) for client in clients} == {expected}


@pytest.mark.long
def test_the_server_stays_ready_while_a_killed_worker_is_replaced(
    lasting: ServerProcess, clients: list[Client]
) -> None:
    """No new client can reach that worker."""
    seen, watched = set[object](), [list[int]() for _ in clients]

    def watch(client: Client, told: list[int]) -> None:
        health: Any = health_pb2_grpc.HealthStub(client.channel)
        with suppress(grpc.RpcError):  # the stream was connected to the killed worker, or the test is over
            told.extend(update.status for update in health.Watch(health_pb2.HealthCheckRequest(service="mlp")))

    threads = [threading.Thread(target=watch, args=each) for each in zip(clients, watched, strict=True)]
    for thread in threads:
        thread.start()
    until(lambda: all(watched), what="the first update of every stream")
    victim = pids(lasting)[0]
    os.kill(victim, signal.SIGKILL)

    def replaced() -> bool:
        for client in clients[:3]:
            seen.add(lasting.get("/readyz")[0])
            with suppress(grpc.RpcError):  # its connection was to the killed worker
                seen.add(ready(client))
        return victim not in pids(lasting) and listening(lasting) == 2

    until(replaced, 60, "another worker in place of the dead one")
    assert seen == {200, READY}
    assert {ready(client) for client in clients} == {READY}
    for client in clients:
        client.channel.close()
    for thread in threads:
        thread.join(20)
    assert watched == [[health_pb2.HealthCheckResponse.SERVING]] * len(clients), "no other update was sent"


@pytest.mark.long
def test_a_server_without_any_worker_is_not_ready(lasting: ServerProcess, clients: list[Client]) -> None:
    victims = pids(lasting)
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    until(lambda: lasting.get("/readyz")[0] == 503, what="not ready")
    wait_replaced(lasting, *victims)
    until(lambda: lasting.get("/readyz")[0] == 200, 60, "ready again")
    until(lambda: {ready(client) for client in clients} == {READY}, what="ready, says everyone")


@pytest.mark.long
def test_a_real_time_signal_ends_a_worker_but_not_the_server(lasting: ServerProcess) -> None:
    """Python has no name for such a signal."""
    victim = pids(lasting)[0]
    os.kill(victim, signal.SIGRTMIN + 6)
    wait_replaced(lasting, victim)
    assert f"(pid {victim}) has ended: killed by SIGRTMIN+6" in lasting.log
    assert lasting.get("/readyz")[0] == 200


@pytest.mark.long
def test_a_restarted_worker_serves_the_same_profile_as_the_others(
    tmp_path: Path, serve: Serve, converted_mlp: Path
) -> None:
    server = serve("--repository", str(converted_mlp), "--workers", "2").wait_ready()

    def choices() -> set[tuple[str, str]]:
        found = set()
        for _ in range(15):
            client = Client(server.target)
            told = client.call("ModelMetadata", pb.ModelMetadataRequest(name="mlp")).properties
            found.add((told["profile"], told["choice"]))
            client.channel.close()
        return found

    chosen = choices()
    assert len(chosen) == 1
    for victim in pids(server):
        os.kill(victim, signal.SIGKILL)
        wait_replaced(server, victim)
    assert choices() == chosen


@pytest.mark.long
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


@pytest.mark.long  # the supervisor waits ten seconds for the worker to respond
def test_a_worker_that_hangs_is_killed_and_restarted(lasting: ServerProcess, clients: list[Client]) -> None:
    victim = pids(lasting)[0]
    os.kill(victim, signal.SIGSTOP)
    until(lambda: not alive(victim), 60, "the end of the one that stands still")
    wait_replaced(lasting, victim)
    assert "has not answered for" in lasting.log
    until(lambda: {ready(client) for client in clients} == {READY}, what="ready, says everyone")


@pytest.mark.long
def test_a_killed_supervisor_leaves_no_worker_behind_and_frees_the_port(
    server: ServerProcess, repository: Path, serve: Serve
) -> None:
    workers, port = pids(server), server.ports()[0]
    os.kill(server.process.pid, signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in workers), what="the end of the workers")
    serve("--repository", str(repository), "--workers", "2", "--grpc-port", str(port)).wait_ready()


@pytest.mark.long
def test_workers_ignore_signals_sent_to_them_directly(server: ServerProcess) -> None:
    """systemd sends SIGTERM and a terminal sends SIGINT to every process; only the supervisor must react."""
    workers = pids(server)
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    server.terminate()
    assert server.exit_code() == 0
    assert not any(alive(pid) for pid in workers)
    assert "has ended" not in server.log


@pytest.mark.long
def test_sigterm_finishes_the_requests_in_flight_in_every_worker(repository: Path, serve: Serve) -> None:
    """The queue waits two seconds for a fuller batch, which keeps a request of each connection in flight."""
    (repository / "mlp" / "serving.yaml").write_text("max_queue_delay_ms: 2000\n")
    server = serve("--repository", str(repository), "--workers", "2").wait_ready()
    with ExitStack() as stack:
        made = [Client(server.target) for _ in range(10)]
        for client in made:
            stack.enter_context(client.channel)
            client.call("ServerLive", pb.ServerLiveRequest())
        started = [client.ask("ModelInfer").future(infer_request("mlp", x=ROWS), timeout=60) for client in made]
        until(lambda: server.metric(IN_FLIGHT) == len(made), what="all of them at work")
        server.terminate()
        assert server.exit_code() == 0
        ends = {call.code() for call in started}
    assert ends == {grpc.StatusCode.OK}
    assert "requests were cut off" not in server.log


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("first", ["1", "2"])
def test_a_second_server_on_the_same_port_exits_with_an_error(repository: Path, serve: Serve, first: str) -> None:
    port = serve("--repository", str(repository), "--workers", first).ports()[0]
    second = serve("--repository", str(repository), "--workers", "2", "--grpc-port", str(port))
    assert second.exit_code() == 2
    assert f"port {port} on 127.0.0.1 is in use by another program" in second.log


def _in_memory(key: str) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="mlp")
    x = message.inputs.add(name="x", datatype="FP32", shape=ROWS.shape)
    x.parameters["shared_memory_region"].string_param = key
    x.parameters["shared_memory_byte_size"].int64_param = ROWS.nbytes
    return message


def test_shared_memory_registered_with_one_worker_is_usable_in_all_and_in_later_ones(
    lasting: ServerProcess,
) -> None:
    memory = Path(f"/dev/shm/workers-{os.getpid()}")
    memory.write_bytes(ROWS.tobytes())
    server, before = lasting, pids(lasting)

    def answers() -> set[bytes]:
        """Return the distinct outputs over connections to all workers."""
        found = set[bytes]()
        for _ in range(15):
            client = Client(server.target)
            with client.channel:
                found.add(client.call("ModelInfer", _in_memory("r")).raw_output_contents[0])
        return found

    try:
        client = Client(server.target)
        with client.channel:
            expected = {infer(client)}
            register = pb.SystemSharedMemoryRegisterRequest(name="r", key=memory.name, byte_size=ROWS.nbytes)
            client.call("SystemSharedMemoryRegister", register)
            assert "system_shared_memory" in client.call("ServerMetadata", pb.ServerMetadataRequest()).extensions
        assert answers() == expected
    finally:
        memory.unlink()
    os.kill(before[0], signal.SIGKILL)
    wait_replaced(server, before[0])
    assert answers() == expected
    client = Client(server.target)
    with client.channel:
        client.call("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest())
    with pytest.raises(grpc.RpcError, match="unknown shared memory region 'r'"):
        answers()
