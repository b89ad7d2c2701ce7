"""The program with a cluster of its own: how it starts, what it refuses, and how it ends."""

from __future__ import annotations

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from artifacts import write_mlp
from raycluster import PATIENCE, request, told
from waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # what Ray and its libraries warn of is theirs
_MODELS = ("a", "b")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Requests to either wait for others to come, for two seconds."""
    for name in _MODELS:
        write_mlp(tmp_path / name / "1")
        (tmp_path / name / "serving.yaml").write_text("max_queue_delay_ms: 2000\n")
    return tmp_path


@contextmanager
def _started(repository: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "deploy.ray", "--repository", str(repository), *arguments]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", **environment}
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        yield running
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate()


def _ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


def _page(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


@pytest.mark.parametrize("taken", ["--grpc-port", "--http-port"])
def test_a_port_that_is_taken(repository: Path, taken: str) -> None:
    """And the address that is given counts, not the environment's."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with _started(repository, taken, str(port), "--address", "local", RAY_ADDRESS="127.0.0.1:1") as running:
            said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 2, said
    assert f"port {port} on" in said
    assert f"is in use by another program; stop it, or choose another {taken}" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("given", ["--address", "RAY_ADDRESS"])
def test_an_address_where_nobody_answers(repository: Path, given: str) -> None:
    where = "127.0.0.1:1"
    arguments, environment = ((given, where), {}) if given.startswith("-") else ((), {given: where})
    with _started(repository, *arguments, **environment) as running:
        said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 2, said
    assert f"{given} {where}: no Ray cluster is reached" in said
    assert "Traceback" not in said


def test_a_model_that_cannot_be_served_is_told_as_a_server_tells_it_and_tried_again(repository: Path) -> None:
    """Ray has given it up by then: nobody but the front knows why."""
    weights = repository / "b" / "1" / "weights.bf16"
    weights.write_bytes(bytes(weights.stat().st_size))
    grpc_port, http_port = _ports()
    ports = ("--grpc-port", str(grpc_port), "--http-port", str(http_port), "--cpus", "0.5", "--device", "cpu")
    with _started(repository, *ports) as running, grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:

        def refused() -> tuple[Any, Any]:
            return told(channel, "ModelInfer", request("b"), timeout=2)

        words = "no version of model 'b' is ready; its replicas' log says why"
        until(lambda: refused() == (grpc.StatusCode.NOT_FOUND, words), PATIENCE, "the refusal")
        until(lambda: told(channel, "ModelInfer", request("a"))[0] is grpc.StatusCode.OK, PATIENCE, "the other model")
        assert "sha256" in _page(http_port, "/status.json")[1]
        shutil.rmtree(repository / "b")  # and the repository is not looked at: nothing tells of it
        write_mlp(repository / "b" / "1")
        until(lambda: told(channel, "ModelInfer", request("b"))[0] is grpc.StatusCode.OK, PATIENCE, "the next try")
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=PATIENCE)
    assert running.returncode == 0


def test_what_is_asked_for_in_vain_is_in_the_log(repository: Path) -> None:
    """More than any node has, and a variable that nothing reads."""
    grpc_port, http_port = _ports()
    ports = ("--grpc-port", str(grpc_port), "--http-port", str(http_port))
    with _started(repository, *ports, "--cpus", "5000", BF16KIT_DRAIN_SECONDS="1", BF16KIT_POL_SECONDS="2") as running:
        until(lambda: _page(http_port, "/readyz")[0] == 503, PATIENCE, "the front")
        running.send_signal(signal.SIGTERM)
        said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, said
    assert "model 'a': no node of the cluster has the resources of a replica, 5,000 CPU, " in said
    assert "variables are ignored: 'BF16KIT_POL_SECONDS' (BF16KIT_POLL_SECONDS?)" in said


def test_it_ends_when_what_is_at_work_is_answered(repository: Path) -> None:
    """Not ready at once, and for as long as load balancers may need; nothing of it is left."""
    grpc_port, http_port = _ports()
    (repository / "server.yaml").write_text("lame_duck_seconds: 3\ndrain_seconds: 20\ndevice: cpu\n")
    ports = ("--grpc-port", str(grpc_port), "--http-port", str(http_port), "--cpus", "0.5")
    with _started(repository, *ports, "--config", str(repository / "server.yaml")) as running:
        until(lambda: running.poll() is not None or _page(http_port, "/readyz")[0] == 200, PATIENCE, "readiness")
        targets = json.loads(_page(http_port, "/targets")[1])[0]["targets"]
        assert len(targets) == 2
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel, ThreadPoolExecutor(4) as pool:
            running.send_signal(signal.SIGTERM)
            until(lambda: _page(http_port, "/readyz")[0] == 503, 20, "no readiness")
            begun = time.monotonic()
            asked = [pool.submit(told, channel, "ModelInfer", request(name)) for name in _MODELS]
            assert [each.result()[0] for each in asked] == [grpc.StatusCode.OK] * 2, "after the signal, too"
            late = [pool.submit(told, channel, "ModelInfer", request(name)) for name in _MODELS]
            assert [each.result()[0] for each in late] == [grpc.StatusCode.OK] * 2, "and during the removal"
        said, _ = running.communicate(timeout=PATIENCE)
        took = time.monotonic() - begun
    assert running.returncode == 0, said
    assert "not removed in time" not in said
    assert "Traceback" not in said, said
    assert took < 40, f"{took:.1f} s"
    assert _page(http_port, "/livez")[0] == 0
