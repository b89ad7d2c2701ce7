"""Control RPCs to a server of several processes apply to all workers, whichever worker receives them."""

import os
import re
import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
from artifacts import write_mlp
from serverprocess import ServerProcess
from waiting import until
from workerprocesses import Client, is_replaced, pids, several, wait_replaced

from bf16kit.protocol import inference_pb2 as pb

pytestmark = pytest.mark.long  # starts servers of several processes again and again

ROWS = np.random.default_rng(0).standard_normal((1, 16)).astype(np.float32)
Clients = list[Client]


@pytest.fixture
def memory() -> Iterator[str]:
    """Yield the key of a file in /dev/shm with one row of the model's input."""
    file = Path(f"/dev/shm/bf16kit-{uuid.uuid4().hex}")
    file.write_bytes(ROWS.tobytes())
    yield f"/{file.name}"
    file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("mlp", "other"):
        write_mlp(root / name / "1")
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    """Yield a server that each test leaves as it was: two workers that serve mlp only."""
    flags = ("--workers", "2", "--model-control", "explicit", "--load-model", "mlp")
    with ServerProcess("--repository", repository, *flags, env={"BF16KIT_SHARED_MEMORY": "true"}) as server:
        yield server.wait_ready()


@pytest.fixture
def clients(server: ServerProcess) -> Iterator[Clients]:
    with several(server) as clients:
        yield clients


def load(client: Client, model: str) -> None:
    client.call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=model), 60)


def unload(client: Client, model: str) -> None:
    client.call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=model), 60)


def register(client: Client, memory: str) -> None:
    region = pb.SystemSharedMemoryRegisterRequest(name="r", key=memory, byte_size=ROWS.nbytes)
    client.call("SystemSharedMemoryRegister", region, 60)


def unregister(client: Client) -> None:
    client.call("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest())


def verbose(client: Client, level: int | None = None) -> int:
    """Set the verbosity of the log, if one is given, and return what it is then."""
    message = pb.LogSettingsRequest()
    if level is not None:
        message.settings["log_verbose_level"].uint32_param = level
    return int(client.call("LogSettings", message, 60).settings["log_verbose_level"].uint32_param)


def counted(client: Client) -> tuple[int, int, int]:
    """Return ModelStatistics' counts for the model: requests, rows, batches."""
    told = client.call("ModelStatistics", pb.ModelStatisticsRequest(name="mlp")).model_stats[0]
    return told.inference_stats.success.count, told.inference_count, told.execution_count


def index(client: Client) -> list[tuple[str, str, str]]:
    models = client.call("RepositoryIndex", pb.RepositoryIndexRequest()).models
    return [(model.name, model.version, model.state) for model in models]


def code_of(call: Callable[[], object]) -> grpc.StatusCode:
    try:
        call()
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def test_statistics_and_metrics_sum_all_workers_and_survive_the_death_of_one(
    server: ServerProcess, clients: Clients
) -> None:
    (before,) = {counted(client) for client in clients}
    for client in clients:
        client.infer(x=ROWS)
    after = tuple(count + len(clients) for count in before)
    assert {counted(client) for client in clients} == {after}
    assert server.of_model("request_duration_seconds_count") == after[0]
    assert server.of_model("model_ready") == 1
    text = server.get("/metrics")[1]
    assert "pid=" not in text
    assert len(re.findall(r"^process_resident_memory_bytes ", text, re.MULTILINE)) == 1
    os.kill(victim := pids(server)[0], signal.SIGKILL)
    seen: list[float] = []

    def back() -> bool:
        seen.append(server.of_model("requests_total", code="OK"))
        return is_replaced(server, victim)

    until(back, 60, "another in its place")
    assert set(seen) == {after[0]}
    with Client(server.target) as fresh:
        assert counted(fresh) == after


def test_a_model_is_loaded_and_unloaded_in_all_workers(server: ServerProcess, clients: Clients) -> None:
    assert index(clients[0]) == [("mlp", "1", "READY"), ("other", "", "")]
    load(clients[0], "other")
    assert len({client.infer("other", x=ROWS) for client in clients}) == 1
    assert {tuple(index(client)) for client in clients} == {(("mlp", "1", "READY"), ("other", "1", "READY"))}
    unload(clients[1], "other")
    assert {code_of(partial(client.infer, "other", x=ROWS)) for client in clients} == {grpc.StatusCode.NOT_FOUND}
    until(lambda: 'model="other"' not in server.get("/metrics")[1], what="its metrics gone, the reference's too,")


def test_a_failed_load_leaves_the_old_model_in_all_workers(
    server: ServerProcess, clients: Clients, repository: Path
) -> None:
    before = clients[0].infer(x=ROWS)
    weights = repository / "mlp" / "1" / "weights.bf16"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(bytes([content[0] ^ 0xFF]) + content[1:])
    assert server.of_model("model_replacement_failed") == 0
    assert code_of(lambda: load(clients[0], "mlp")) is not grpc.StatusCode.OK
    assert {client.infer(x=ROWS) for client in clients} == {before}
    until(lambda: server.of_model("model_replacement_failed") == 1)
    weights.write_bytes(content)
    load(clients[0], "mlp")
    until(lambda: server.of_model("model_replacement_failed") == 0)


def infer_in_memory(client: Client) -> bytes:
    """Send a request whose input is in the region r."""
    message = pb.ModelInferRequest(model_name="mlp")
    x = message.inputs.add(name="x", datatype="FP32", shape=ROWS.shape)
    x.parameters["shared_memory_region"].string_param = "r"
    x.parameters["shared_memory_byte_size"].int64_param = ROWS.nbytes
    return bytes(client.call("ModelInfer", message).raw_output_contents[0])


def test_shared_memory_registered_with_one_worker_is_usable_in_all_and_in_later_ones(
    server: ServerProcess, clients: Clients, memory: str
) -> None:
    expected = {clients[0].infer(x=ROWS)}
    register(clients[0], memory)
    assert "system_shared_memory" in clients[0].call("ServerMetadata", pb.ServerMetadataRequest()).extensions
    assert {infer_in_memory(client) for client in clients} == expected
    Path("/dev/shm", memory[1:]).unlink()
    os.kill(victim := pids(server)[0], signal.SIGKILL)
    wait_replaced(server, victim)
    with several(server) as later:
        assert {infer_in_memory(client) for client in later} == expected
        unregister(later[0])
        for client in later:
            with pytest.raises(grpc.RpcError, match="unknown shared memory region 'r'"):
                infer_in_memory(client)


def test_control_rpcs_complete_when_a_worker_is_killed_meanwhile(
    server: ServerProcess, clients: Clients, memory: str
) -> None:
    """The worker is stopped first, so that the RPCs, sent to the other worker, wait until it is killed."""
    victim = pids(server)[1]
    os.kill(victim, signal.SIGSTOP)
    asked = {client: client.ask("ServerLive").future(pb.ServerLiveRequest(), timeout=60) for client in clients}
    until(lambda: any(call.done() for call in asked.values()), what="an answer of the other one")
    answering = next(client for client, call in asked.items() if call.done())
    calls: list[Callable[[], object]] = [
        partial(load, answering, "other"),
        partial(unload, answering, "mlp"),
        partial(register, answering, memory),
        partial(verbose, answering, 1),
    ]
    with ThreadPoolExecutor(len(calls)) as pool:
        ends = [pool.submit(code_of, call) for call in calls]
        assert not wait(ends, 1.0).done, "they wait for all"
        os.kill(victim, signal.SIGKILL)
        assert {each.result(60) for each in ends} == {grpc.StatusCode.OK}
    wait_replaced(server, victim)
    served = [("mlp", "1", "UNAVAILABLE"), ("other", "1", "READY")]
    until(lambda: index(answering) == served, 60, "the change everywhere")
    load(answering, "mlp")
    unload(answering, "other")
    unregister(answering)
    assert verbose(answering, 0) == 0
