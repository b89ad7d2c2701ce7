"""Live drift of a server of several workers: one separate process holds the reference."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_mlp
from loopback import infer_request
from serverprocess import Serve, ServerProcess
from waiting import until
from workerprocesses import Client, pids

from service.drift.sampler import BURST_S

pytestmark = pytest.mark.long  # starts servers of several processes again and again

SHADOW = "service.shadow.references"
MEASURED = 'bf16kit_drift_samples_total{model="mlp",outcome="measured",version="1"}'
DROPPED = 'bf16kit_drift_samples_total{model="mlp",outcome="dropped",version="1"}'
COUNT = 'bf16kit_drift_relative_l2_count{model="mlp",output="y",version="1"}'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_mlp(tmp_path / "mlp" / "1", logits=True)
    return tmp_path


def ask(server: ServerProcess, times: int) -> None:
    """Send ``times`` requests of two rows, each over a new connection."""
    rows = np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)
    with ExitStack() as stack:
        for _ in range(times):
            client = Client(server.target)
            stack.enter_context(client.channel)
            client.call("ModelInfer", infer_request("mlp", x=rows))


def test_one_process_measures_all_workers_and_starts_with_the_first_sample(repository: Path, serve: Serve) -> None:
    (repository / "mlp" / "serving.yaml").write_text("shadow: {rate: 1.0, max_per_second: 1000}\n")
    server = serve("--repository", str(repository), "--workers", "2").wait_ready()
    assert pids(server, SHADOW) == []
    ask(server, 6)
    until(lambda: server.metric(MEASURED) == 12, 60, "all of them measured")
    assert server.metric(COUNT) == 12
    assert 0 < server.metric('bf16kit_drift_budget_ratio{metric="relative_l2",model="mlp",output="y",version="1"}') < 1
    assert server.metric('bf16kit_model_ready{model="mlp",version="1"}') == 1
    assert server.log.count("live drift on") == 1, "and nobody else has loaded the reference"
    (shadow,) = pids(server, SHADOW)
    os.kill(shadow, signal.SIGKILL)
    until(lambda: pids(server, SHADOW) not in ([], [shadow]), 60, "another in its place")
    assert server.get("/readyz")[0] == 200, "who measures is not who answers"
    assert server.metric(COUNT) == 12, "what was counted stays"
    ask(server, 3)
    until(lambda: server.metric(MEASURED) == 18, 60, "measured again")
    server.terminate()
    assert server.exit_code() == 0


def test_the_sampling_rate_limits_the_whole_server_not_each_worker(repository: Path, serve: Serve) -> None:
    """Three workers choose 0.8 requests a second each, and one a second is measured after the first burst."""
    (repository / "mlp" / "serving.yaml").write_text("shadow: {rate: 1.0, max_per_second: 1}\n")
    server = serve("--repository", str(repository), "--workers", "3").wait_ready()
    begun = time.monotonic()
    while time.monotonic() < begun + 8 or not server.metric(DROPPED):
        ask(server, 6)
    until(lambda: server.metric(MEASURED) > 0, 60, "the rest measured")
    assert server.metric(MEASURED) / 2 <= BURST_S + time.monotonic() - begun
