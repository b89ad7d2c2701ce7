"""Damage weights in a running server's memory: the golden gate detects it, and every interface reports it."""

from pathlib import Path

import faults
import numpy as np
import pytest
import tritonclient.grpc as triton
from loopback import infer_request
from serverprocess import Serve, ServerProcess
from waiting import until
from workerprocesses import Client

from bf16kit.runtime.ort import kernel

pytestmark = pytest.mark.skipif(
    not kernel.configured_kernel().path, reason="weights that are read as stored need the CPU kernel"
)
X = np.ones((1, 64), np.float32)


def flipped(process: int, artifact: Path) -> int:
    return faults.flip(process, faults.stored(artifact, "a"))


def verdict(server: ServerProcess) -> str:
    with triton.InferenceServerClient(server.target) as client:
        return str(client.get_model_config("m").config.parameters["golden"].string_value)


def precision(server: ServerProcess) -> str:
    with Client(server.target) as client:
        response = client.call("ModelInfer", infer_request("m", x=X))
    return str(response.parameters["precision"].string_param)


def failures(server: ServerProcess) -> float:
    return server.of_model("golden_gate_runs_total", "m", outcome="failed")


def start(serve: Serve, repository: Path, serving: str) -> ServerProcess:
    faults.write_pair(repository / "m" / "1")
    (repository / "m" / "serving.yaml").write_text(f"golden_seconds: 1\n{serving}\n")
    return serve("--repository", repository).wait_ready()


@pytest.mark.long
def test_scheduled_gate_detects_damage_in_memory_and_every_interface_reports_it(tmp_path: Path, serve: Serve) -> None:
    server = start(serve, tmp_path, "shadow: {rate: 0}")
    before = server.infer("m", {"x": X})["y"]
    assert server.of_model("golden_gate_passed", "m") == 1
    assert verdict(server).startswith("golden samples within budget")

    assert flipped(server.process.pid, tmp_path / "m" / "1") >= 1
    until(lambda: server.of_model("golden_gate_passed", "m") == 0, 60, "a gate that failed")
    assert failures(server) >= 1
    assert verdict(server).startswith("FAILED 20")
    assert "output 'y': relative_l2 is" in verdict(server)
    assert "golden gate failed on schedule" in server.log
    assert "load it again (restart the server" in server.log
    assert "FAILED 20" in server.get("/status.json")[1]
    assert server.get("/readyz")[0] == 200, "it goes on serving: who calls is told by metrics, log and page"
    assert not np.array_equal(server.infer("m", {"x": X})["y"], before), "the weights that answer were damaged"


def test_a_failed_gate_switches_to_fp32_if_the_fallback_policy_is_fp32(tmp_path: Path, serve: Serve) -> None:
    """The switch needs no live sample, and so no client with a wrong output."""
    server = start(serve, tmp_path, "fallback: fp32\nshadow: {max_per_second: 1.0e-9}")
    assert precision(server) == "bf16"
    flipped(server.process.pid, tmp_path / "m" / "1")
    until(lambda: server.of_model("fallback_active", "m") == 1, 60, "fp32 that answers")
    assert precision(server) == "fp32"
    assert "something is broken" in server.log
    until(lambda: failures(server) >= 1, 60, "the gate is counted")
