"""A new version fails its golden gate: the old one serves, before and after a restart, and metrics and log say so."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from artifacts import write_mlp
from serverprocess import Serve, ServerProcess
from waiting import until
from workerprocesses import pids, wait_replaced

FAILED = 'bf16kit_golden_gate_runs_total{model="m",outcome="failed",version="2"}'
INSTEAD = "; version 1 serves instead"


def ready(version: int) -> str:
    return f'bf16kit_model_ready{{model="m",version="{version}"}}'


def passed(version: int) -> str:
    return f'bf16kit_golden_gate_passed{{model="m",version="{version}"}}'


def check_version_1_serves(server: ServerProcess) -> None:
    until(lambda: INSTEAD in server.log, 60, "a line in the log")
    said, *_ = (line for line in server.lines if INSTEAD in line)
    assert " ERROR " in said
    assert "model 'm': version 2 cannot be loaded: " in said
    assert "golden samples are over the drift budget" in said
    assert server.get("/readyz")[0] == 200
    values = [server.metric(series) for series in (ready(1), passed(1), ready(2), passed(2))]
    assert values == [1, 1, 0, 0]
    assert server.metric(FAILED) >= 1
    assert INSTEAD in server.get("/status.json")[1]
    with triton.InferenceServerClient(server.target) as client:
        assert client.is_model_ready("m")
        assert client.get_model_metadata("m").versions == ["1"]


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_failed_rollout_is_reported_and_survives_a_restart(tmp_path: Path, serve: Serve, workers: int) -> None:
    model = tmp_path / "models" / "m"
    (tmp_path / "server.yaml").write_text(f"model_control: poll\npoll_seconds: 1\nworkers: {workers}\n")
    write_mlp(model / "1")
    (model / "serving.yaml").write_text("shadow: {rate: 0}\n")
    options = ("--repository", str(model.parent), "--config", str(tmp_path / "server.yaml"))
    server = serve(*options).wait_ready()
    write_mlp(model / "2", spoil=0.5)
    check_version_1_serves(server)
    server.terminate()
    assert server.exit_code() == 0

    server = serve(*options).wait_ready()
    check_version_1_serves(server)
    if workers > 1:
        (victim, *_) = pids(server)
        os.kill(victim, signal.SIGKILL)
        wait_replaced(server, victim)
        until(lambda: server.metric("bf16kit_worker_restarts_total") == 1, what="a counted restart")
        assert [server.metric(series) for series in (ready(1), ready(2))] == [1, 0]
        assert server.get("/readyz")[0] == 200
    write_mlp(model / "3")
    until(lambda: server.metric(ready(3)) == 1 and server.metric(ready(1)) == -1, 60, "version 3 in place of 1")
    assert server.metric(ready(2)) == -1, "it is not wanted any more"
    server.terminate()
    assert server.exit_code() == 0


@pytest.mark.long
def test_a_version_replaced_by_one_that_fails_is_reported_while_it_serves(tmp_path: Path, serve: Serve) -> None:
    """At the next restart the server has nothing else to load."""
    model = tmp_path / "models" / "m"
    (tmp_path / "server.yaml").write_text("model_control: poll\npoll_seconds: 1\n")
    write_mlp(model / "1")
    (model / "serving.yaml").write_text("shadow: {rate: 0}\n")
    server = serve("--repository", str(model.parent), "--config", str(tmp_path / "server.yaml")).wait_ready()
    failed = 'bf16kit_model_replacement_failed{model="m",version="1"}'
    assert server.metric(failed) == 0
    for spoil, value in ((0.5, 1), (0, 0)):
        shutil.rmtree(model / "1")
        write_mlp(model / "1", spoil=spoil)
        until(lambda value=value: server.metric(failed) == value, 60, f"{failed} {value}")  # type: ignore[misc]
        assert [server.metric(series) for series in (ready(1), passed(1))] == [1, 1]
    server.terminate()
    assert server.exit_code() == 0


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_strict_policy_serves_no_older_version_after_a_restart(tmp_path: Path, serve: Serve, workers: int) -> None:
    write_mlp(tmp_path / "m" / "1")
    write_mlp(tmp_path / "m" / "2", spoil=0.5)
    (tmp_path / "m" / "serving.yaml").write_text("shadow: {rate: 0}\nversion_policy: {latest: 1, strict: true}\n")
    server = serve("--repository", str(tmp_path), "--workers", str(workers))
    until(lambda: server.metric(passed(2)) == 0 and server.metric(FAILED) == workers, 60, "a gate that failed")
    assert server.get("/readyz")[0] == 503
    assert [server.metric(series) for series in (ready(1), ready(2))] == [-1, 0]
