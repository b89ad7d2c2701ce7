"""``python -m bf16kit.deploy.ray`` with its own cluster: how it starts, which input it rejects, and how it ends."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from artifacts import write_mlp
from raycluster import PATIENCE, call_rpc, free_ports, request
from waiting import slowdown, until

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # warnings of Ray and its libraries
_MODELS = ("a", "b")
# The program where Ray does not wait for its proxies, as if the machine were too busy to start them in time.
_BUSY = """
import runpy
from ray.serve._private import api, client

api.HTTP_PROXY_TIMEOUT = client.HTTP_PROXY_TIMEOUT = 0.001
runpy.run_module("bf16kit.deploy.ray", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository of two models whose requests wait two seconds for a fuller batch."""
    for name in _MODELS:
        write_mlp(tmp_path / name / "1")
        (tmp_path / name / "serving.yaml").write_text("max_queue_delay_ms: 2000\n")
    return tmp_path


@contextmanager
def _started(repository: Path, *arguments: str, code: str = "", **environment: str) -> Iterator[subprocess.Popen[str]]:
    program = ("-c", code) if code else ("-m", "bf16kit.deploy.ray")
    command = [sys.executable, *program, "--repository", str(repository), *arguments]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", **environment}
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert running.stdout is not None
    # The pipe is read at the end only. Ray writes a stack trace for each call whose deadline has passed, and would wait
    # for room: a pipe has 64 kB.
    fcntl.fcntl(running.stdout, fcntl.F_SETPIPE_SZ, 1 << 20)
    try:
        yield running
    finally:
        if running.poll() is None:
            running.kill()
        with running:  # closes the pipe and waits
            pass


def _until(running: subprocess.Popen[str], condition: Callable[[], object], what: str) -> None:
    """Wait for ``condition``. Fail at once, with what it printed, if the program has ended."""

    def ended_or_true() -> object:
        assert running.poll() is None, running.communicate()[0]
        return condition()

    until(ended_or_true, PATIENCE, what)


def _page(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


@pytest.mark.parametrize("given", ["--grpc-port", "--http-port", "--address", "RAY_ADDRESS"])
def test_a_port_in_use_and_an_unreachable_cluster_give_clear_messages_and_exit_code_2(
    repository: Path, given: str
) -> None:
    """The address on the command line overrides the one in the environment."""
    nowhere = "127.0.0.1:1"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        arguments, environment, words = {
            "--address": ((given, nowhere), {}, f"{given} {nowhere}: no Ray cluster is reached"),
            "RAY_ADDRESS": ((), {given: nowhere}, f"{given} {nowhere}: no Ray cluster is reached"),
        }.get(given, ((given, port, "--address", "local"), {"RAY_ADDRESS": nowhere}, f"choose another {given}"))
        with _started(repository, *arguments, **environment) as running:
            said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 2, said
    assert words in said
    assert "Traceback" not in said


def test_a_model_that_cannot_be_served_is_reported_and_loaded_again_also_where_proxies_are_late(
    repository: Path,
) -> None:
    weights = repository / "b" / "1" / "weights.bf16"
    weights.write_bytes(bytes(weights.stat().st_size))
    grpc_port, http_port = free_ports()
    ports = ("--grpc-port", str(grpc_port), "--http-port", str(http_port), "--cpus", "0.5", "--device", "cpu")
    with (
        _started(repository, *ports, code=_BUSY) as running,
        grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
    ):

        def asked(name: str) -> tuple[Any, Any]:
            return call_rpc(channel, "ModelInfer", request(name), timeout=5)

        words = "no replica of model 'b' is ready; try again later"
        _until(running, lambda: asked("b") == (grpc.StatusCode.UNAVAILABLE, words), "the refusal")
        _until(running, lambda: asked("a")[0] is grpc.StatusCode.OK, "the other model")
        _until(running, lambda: "sha256" in _page(http_port, "/status.json")[1], "the reason")
        shutil.rmtree(repository / "b")  # the repository is not scanned, so nothing reports the change
        write_mlp(repository / "b" / "1")
        _until(running, lambda: asked("b")[0] is grpc.StatusCode.OK, "the next try")
        running.send_signal(signal.SIGTERM)
        said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, said
    assert "Ray is still starting its proxies: HTTP proxies not available after" in said


def test_unavailable_resources_and_unknown_variables_are_logged(repository: Path) -> None:
    """The test requires more CPUs than any node has, and sets a variable that the program does not know."""
    grpc_port, http_port = free_ports()
    ports = ("--grpc-port", str(grpc_port), "--http-port", str(http_port))
    # Ray reports a replica that has not started only after 30 s, unless it is told otherwise.
    variables = {"BF16KIT_DRAIN_SECONDS": "1", "BF16KIT_POL_SECONDS": "2", "RAY_SERVE_SLOW_STARTUP_WARNING_S": "2"}
    with _started(repository, *ports, "--cpus", "5000", **variables) as running:
        told = "to be scheduled"
        _until(running, lambda: told in _page(http_port, "/status.json")[1], "the reason")
        time.sleep(3)  # the program asks once a second; what it logs then can be read only when it has ended
        running.send_signal(signal.SIGTERM)
        said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, said
    assert "bf16kit.a: DEPLOYING: Deployment 'Replica'" in said
    assert "to be scheduled" in said
    assert "variables are ignored: 'BF16KIT_POL_SECONDS' (did you mean BF16KIT_POLL_SECONDS?)" in said


def test_sigterm_ends_the_program_once_requests_in_flight_are_answered(repository: Path) -> None:
    """The program is not ready at once, but serves for as long as load balancers may need; nothing stays running.

    Requests wait two units of time for a fuller batch. They are sent when readiness ends, and one unit before the
    removal begins; a unit is a second, or more on a busy machine.
    """
    grpc_port, http_port = free_ports()
    unit = min(slowdown(), 8.0)
    (repository / "server.yaml").write_text(f"lame_duck_seconds: {3 * unit}\ndrain_seconds: {20 * unit}\ndevice: cpu\n")
    for name in _MODELS:
        (repository / name / "serving.yaml").write_text(f"max_queue_delay_ms: {2000 * unit:.0f}\n")
    ports = ("--grpc-port", str(grpc_port), "--http-port", str(http_port), "--cpus", "0.5")
    with _started(repository, *ports, "--config", str(repository / "server.yaml")) as running:
        _until(running, lambda: _page(http_port, "/readyz")[0] == 200, "readiness")
        targets = json.loads(_page(http_port, "/targets")[1])[0]["targets"]
        assert len(targets) == 2
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel, ThreadPoolExecutor(4) as pool:
            running.send_signal(signal.SIGTERM)
            until(lambda: _page(http_port, "/readyz")[0] == 503, 20 * unit, "no readiness")
            begun = time.monotonic()
            asked = [pool.submit(call_rpc, channel, "ModelInfer", request(name)) for name in _MODELS]
            time.sleep(2 * unit)
            asked += [pool.submit(call_rpc, channel, "ModelInfer", request(name)) for name in _MODELS]
            answers = [each.result() for each in asked]
            assert [code for code, _ in answers] == [grpc.StatusCode.OK] * 4, answers
        said, _ = running.communicate(timeout=PATIENCE)
        took = time.monotonic() - begun
    assert running.returncode == 0, said
    assert "not removed in time" not in said
    assert "Traceback" not in said, said
    assert took < 40 * unit, f"{took:.1f} s"
    assert _page(http_port, "/livez")[0] == 0
