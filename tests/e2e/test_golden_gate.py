"""Damage weights in a running server's memory: the golden gate detects it, and every interface reports it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
PASSED = 'bf16kit_golden_gate_passed{model="m",version="1"}'
FAILED = 'bf16kit_golden_gate_runs_total{model="m",outcome="failed",version="1"}'


def flipped(process: int, artifact: Path) -> int:
    return faults.flip(process, faults.stored(artifact, "a"))


def swapped(process: int, artifact: Path) -> int:
    return faults.swap(process, faults.stored(artifact, "a"), faults.stored(artifact, "b"))


def properties(server: ServerProcess) -> str:
    with triton.InferenceServerClient(server.target) as client:
        return str(client.get_model_config("m").config.parameters["golden"].string_value)


def precision(server: ServerProcess) -> str:
    client = Client(server.target)
    with client.channel:
        response = client.call("ModelInfer", infer_request("m", x=np.ones((1, 64), np.float32)))
    return str(response.parameters["precision"].string_param)


def answer(server: ServerProcess) -> Any:
    x = np.ones((1, 64), np.float32)
    tensor = triton.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    with triton.InferenceServerClient(server.target) as client:
        return client.infer("m", [tensor]).as_numpy("y")


@pytest.mark.long
@pytest.mark.parametrize("damage", [flipped, swapped])
def test_scheduled_gate_detects_damage_in_memory_and_every_interface_reports_it(
    tmp_path: Path, serve: Serve, damage: Callable[[int, Path], int]
) -> None:
    artifact = tmp_path / "m" / "1"
    faults.write_pair(artifact)
    (tmp_path / "m" / "serving.yaml").write_text("golden_seconds: 1\nshadow: {rate: 0}\n")
    server = serve("--repository", str(tmp_path)).wait_ready()
    before = answer(server)
    assert server.metric(PASSED) == 1
    assert properties(server).startswith("golden samples within budget")

    assert damage(server.process.pid, artifact) >= 1
    until(lambda: server.metric(PASSED) == 0, 60, "a gate that failed")
    assert server.metric(FAILED) >= 1
    assert properties(server).startswith("FAILED 20")
    assert "output 'y': relative_l2 is" in properties(server)
    assert "golden gate failed on schedule" in server.log
    assert "load it again (restart the server" in server.log
    assert "FAILED 20" in server.get("/status.json")[1]
    assert server.get("/readyz")[0] == 200, "it goes on serving: who calls is told by metrics, log and page"
    assert not np.array_equal(answer(server), before), "for the weights that answer were damaged"
    server.terminate()
    assert server.exit_code() == 0


def test_a_failed_gate_switches_to_fp32_if_the_fallback_policy_is_fp32(tmp_path: Path, serve: Serve) -> None:
    """The switch needs no live sample, and so no client with a wrong output."""
    artifact = tmp_path / "m" / "1"
    faults.write_pair(artifact)
    (tmp_path / "m" / "serving.yaml").write_text(
        "golden_seconds: 1\nfallback: fp32\nshadow: {max_per_second: 1.0e-9}\n"
    )
    server = serve("--repository", str(tmp_path)).wait_ready()
    assert precision(server) == "bf16"
    flipped(server.process.pid, artifact)
    until(lambda: server.metric('bf16kit_fallback_active{model="m",version="1"}') == 1, 60, "fp32 that answers")
    assert precision(server) == "fp32"
    assert "something is broken" in server.log
    until(lambda: server.metric(FAILED) >= 1, 60, "the gate is counted")
