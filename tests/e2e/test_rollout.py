"""A new version fails its golden gate: the old one serves, before and after a restart, and metrics and log say so."""

import os
import signal
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from artifacts import write_mlp
from serverprocess import Serve, ServerProcess
from waiting import until
from workerprocesses import pids, wait_replaced

pytestmark = pytest.mark.long
INSTEAD = "; version 1 serves instead"
POLLING = {"BF16KIT_POLL_SECONDS": "1", "BF16KIT_MODEL_CONTROL": "poll"}


def ready(server: ServerProcess, version: int) -> float:
    return server.of_model("model_ready", "m", version)


def passed(server: ServerProcess, version: int) -> float:
    return server.of_model("golden_gate_passed", "m", version)


def failures(server: ServerProcess) -> float:
    return server.of_model("golden_gate_runs_total", "m", 2, outcome="failed")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = tmp_path / "models" / "m"
    write_mlp(model / "1")
    (model / "serving.yaml").write_text("shadow: {rate: 0}\n")
    return model


def check_version_1_serves(server: ServerProcess) -> None:
    until(lambda: INSTEAD in server.log, 60, "a line in the log")
    said, *_ = (line for line in server.lines if INSTEAD in line)
    assert " ERROR " in said
    assert "model 'm': version 2 cannot be loaded: " in said
    assert "golden samples are over the drift budget" in said
    assert server.get("/readyz")[0] == 200
    assert [ready(server, 1), passed(server, 1), ready(server, 2), passed(server, 2)] == [1, 1, 0, 0]
    assert failures(server) >= 1
    assert INSTEAD in server.get("/status.json")[1]
    with triton.InferenceServerClient(server.target) as client:
        assert client.is_model_ready("m")
        assert client.get_model_metadata("m").versions == ["1"]


def test_a_failed_rollout_is_reported_and_survives_a_restart(model: Path, serve: Serve) -> None:
    options = ("--repository", model.parent, "--workers", "2")
    server = serve(*options, env=POLLING).wait_ready()
    write_mlp(model / "2", spoil=0.5)
    check_version_1_serves(server)
    server.stop()

    server = serve(*options, env=POLLING).wait_ready()
    check_version_1_serves(server)
    (victim, _) = pids(server)
    os.kill(victim, signal.SIGKILL)
    wait_replaced(server, victim)
    until(lambda: server.metric("bf16kit_worker_restarts_total") == 1, what="a counted restart")
    assert (ready(server, 1), ready(server, 2), server.get("/readyz")[0]) == (1, 0, 200)
    write_mlp(model / "3")
    until(lambda: ready(server, 3) == 1 and ready(server, 1) == -1, 60, "version 3 in place of 1")
    assert ready(server, 2) == -1, "it is not wanted any more"
    server.stop()
