"""Control RPCs to a server of several processes apply to all workers, whichever worker receives them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from artifacts import write_mlp
from loopback import infer_request
from serverprocess import Serve, ServerProcess
from waiting import until
from workerprocesses import Client, listening, pids

from bf16kit.protocol import inference_pb2 as pb

pytestmark = pytest.mark.long  # starts servers of several processes again and again

ROWS = np.random.default_rng(0).standard_normal((1, 16)).astype(np.float32)
ANSWERED = 'bf16kit_requests_total{code="OK",model="mlp",version="1"}'
OK = grpc.StatusCode.OK
_CONTROL = ("RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryRegister", "LogSettings")


@pytest.fixture
def memory() -> Iterator[str]:
    """Yield the key of a file in /dev/shm with room for one row of the model."""
    file = Path(f"/dev/shm/bf16kit-{uuid.uuid4().hex}")
    file.write_bytes(ROWS.tobytes())
    yield f"/{file.name}"
    file.unlink()


@pytest.fixture
def server(tmp_path: Path, serve: Serve) -> ServerProcess:
    write_mlp(tmp_path / "models" / "mlp" / "1")
    write_mlp(tmp_path / "models" / "other" / "1")
    flags = ("--workers", "2", "--model-control", "explicit", "--load-model", "mlp")
    environment = {**os.environ, "BF16KIT_SHARED_MEMORY": "true"}
    return serve("--repository", str(tmp_path / "models"), *flags, env=environment).wait_ready()


@pytest.fixture
def clients(server: ServerProcess) -> Iterator[list[Client]]:
    with ExitStack() as stack:
        made = [Client(server.target) for _ in range(12)]
        for client in made:
            stack.enter_context(client.channel)
        yield made


def infer(client: Client, model: str = "mlp") -> bytes:
    answer: bytes = client.call("ModelInfer", infer_request(model, x=ROWS)).raw_output_contents[0]
    return answer


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
    server: ServerProcess, clients: list[Client]
) -> None:
    for client in clients:
        infer(client)
    assert {counted(client) for client in clients} == {(12, 12, 12)}
    assert server.metric(ANSWERED) == 12
    assert server.metric('bf16kit_request_duration_seconds_count{model="mlp",version="1"}') == 12
    assert server.metric('bf16kit_model_ready{model="mlp",version="1"}') == 1
    text = server.get("/metrics")[1]
    assert "pid=" not in text
    assert len(re.findall(r"^process_resident_memory_bytes ", text, re.MULTILINE)) == 1
    promtool = shutil.which("promtool")
    if promtool is not None:
        checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    os.kill(victim := pids(server)[0], signal.SIGKILL)
    seen = [server.metric(ANSWERED)]

    def back() -> bool:
        seen.append(server.metric(ANSWERED))
        return victim not in pids(server) and listening(server) == 2

    until(back, 60, "another in its place")
    assert set(seen) == {12.0}
    fresh = Client(server.target)
    with fresh.channel:
        assert counted(fresh) == (12, 12, 12)


def test_a_model_is_loaded_and_unloaded_in_all_workers(server: ServerProcess, clients: list[Client]) -> None:
    assert index(clients[0]) == [("mlp", "1", "READY"), ("other", "", "")]
    clients[0].call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="other"))
    assert len({infer(client, "other") for client in clients}) == 1
    assert {tuple(index(client)) for client in clients} == {(("mlp", "1", "READY"), ("other", "1", "READY"))}
    clients[1].call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="other"))
    assert {code_of(partial(infer, client, "other")) for client in clients} == {grpc.StatusCode.NOT_FOUND}
    until(lambda: 'model="other"' not in server.get("/metrics")[1], what="its metrics gone, the reference's too,")


def test_a_failed_load_leaves_the_old_model_in_all_workers(
    server: ServerProcess, clients: list[Client], tmp_path: Path
) -> None:
    before = infer(clients[0])
    weights = tmp_path / "models" / "mlp" / "1" / "weights.bf16"
    content = bytearray(weights.read_bytes())
    content[5] ^= 0xFF
    weights.unlink()
    weights.write_bytes(content)
    load = pb.RepositoryModelLoadRequest(model_name="mlp")
    failed = 'bf16kit_model_replacement_failed{model="mlp",version="1"}'
    assert server.metric(failed) == 0
    assert code_of(lambda: clients[0].call("RepositoryModelLoad", load)) is not grpc.StatusCode.OK
    assert {infer(client) for client in clients} == {before}
    until(lambda: server.metric(failed) == 1)


def test_log_settings_apply_to_all_workers(server: ServerProcess, clients: list[Client]) -> None:
    def level(client: Client, message: pb.LogSettingsRequest) -> int:
        answer: int = client.call("LogSettings", message).settings["log_verbose_level"].uint32_param
        return answer

    change = pb.LogSettingsRequest()
    change.settings["log_verbose_level"].uint32_param = 1
    assert level(clients[0], change) == 1
    assert {level(client, pb.LogSettingsRequest()) for client in clients} == {1}


@pytest.mark.parametrize("rpc", _CONTROL)
def test_a_control_rpc_completes_when_a_worker_is_killed_meanwhile(
    server: ServerProcess, clients: list[Client], memory: str, rpc: str
) -> None:
    """The worker is stopped first, so that the RPC, sent to the other worker, waits until it is killed."""
    messages: dict[str, Any] = {
        "RepositoryModelLoad": pb.RepositoryModelLoadRequest(model_name="other"),
        "RepositoryModelUnload": pb.RepositoryModelUnloadRequest(model_name="mlp"),
        "SystemSharedMemoryRegister": pb.SystemSharedMemoryRegisterRequest(name="r", key=memory, byte_size=4),
        "LogSettings": pb.LogSettingsRequest(),
    }
    messages["LogSettings"].settings["log_verbose_level"].uint32_param = 1
    victim = pids(server)[1]
    os.kill(victim, signal.SIGSTOP)
    asked = {client: client.ask("ServerLive").future(pb.ServerLiveRequest(), timeout=60) for client in clients}
    until(lambda: any(call.done() for call in asked.values()), what="an answer of the other one")
    answering = next(client for client, call in asked.items() if call.done())
    ends: list[grpc.StatusCode] = []
    calling = threading.Thread(target=lambda: ends.append(code_of(lambda: answering.call(rpc, messages[rpc], 60.0))))
    calling.start()
    calling.join(1.0)
    assert ends == [], "it waits for all"
    os.kill(victim, signal.SIGKILL)
    calling.join(60)
    assert ends == [OK]
    until(lambda: len(pids(server)) == 2 and victim not in pids(server), 60, "another in its place")
    if rpc == "RepositoryModelUnload":
        until(lambda: server.get("/readyz")[0] == 200, 60)
        assert index(answering)[0] == ("mlp", "1", "UNAVAILABLE")
    elif rpc == "RepositoryModelLoad":
        until(lambda: ("other", "1", "READY") in index(answering), 60, "loaded everywhere")
