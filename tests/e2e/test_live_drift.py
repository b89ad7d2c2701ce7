"""Live drift of a real server: the process with the fp32 references, and what the server does without it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_greedy, write_mlp
from serverprocess import Serve, ServerProcess
from waiting import until as until_within
from workerprocesses import SHADOW, Client, alive, pids

from bf16kit.numerics.tensors import Array

pytestmark = pytest.mark.long

PATIENCE_S = 90  # the process has a low priority, and other tests use the processor meanwhile
ROWS = np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)
STARTED = "the shadow is started"


def until(condition: Callable[[], object], what: str = "the condition") -> None:
    until_within(condition, PATIENCE_S, what)


def samples(server: ServerProcess, outcome: str, model: str = "mlp") -> float:
    return server.of_model("drift_samples_total", model, outcome=outcome)


def is_up(server: ServerProcess, model: str = "mlp") -> float:
    return server.of_model("drift_reference_up", model)


def put(repository: Path, model: str, write: Callable[[Path], object] = write_mlp, rate: int = 1) -> None:
    write(repository / model / "1")
    (repository / model / "serving.yaml").write_text(f"shadow: {{rate: {rate}, max_per_second: 1000}}\n")


def ask(server: ServerProcess, model: str = "mlp", rows: Array = ROWS, times: int = 1) -> float:
    """Send requests, each over a new connection; return the longest time to a response, in seconds."""
    longest = 0.0
    for _ in range(times):
        with Client(server.target) as client:
            begun = time.monotonic()
            client.infer(model, x=rows)
            longest = max(longest, time.monotonic() - begun)
    return longest


def ask_until(server: ServerProcess, outcome: str) -> None:
    """Send requests until a sample has this outcome; check that no request is delayed meanwhile."""

    def counted() -> bool:
        assert ask(server, times=30) < 5
        return samples(server, outcome) > 0

    until(counted, f"a sample that is {outcome}")


def test_a_stopped_and_killed_shadow_is_replaced_and_its_lost_samples_are_counted(tmp_path: Path, serve: Serve) -> None:
    """One process measures the requests of all workers, and starts with the first sample."""
    put(tmp_path, "mlp")
    server = serve("--repository", tmp_path, "--workers", "2").wait_ready()

    def count() -> float:
        return server.of_model("drift_relative_l2_count", output="y")

    assert (pids(server, SHADOW), is_up(server)) == ([], -1), "before the first sample"
    ask(server, times=6)
    until(lambda: samples(server, "measured") == 12)
    assert count() == 12
    assert is_up(server) == 1
    last = server.of_model("drift_last_sample_timestamp_seconds")
    assert abs(last - time.time()) < 2 * PATIENCE_S
    (first,) = pids(server, SHADOW)

    os.kill(first, signal.SIGSTOP)  # the shadow reads nothing now: the queue is bounded, and no request waits for it
    ask_until(server, "dropped")
    os.kill(first, signal.SIGKILL)
    until(lambda: samples(server, "failed") >= 2 * 16, "what was with it is counted")
    assert count() == 12, "what it had counted stays"
    assert server.of_model("drift_last_sample_timestamp_seconds") == last
    until(lambda: pids(server, SHADOW) not in ([], [first]), "another in its place")
    assert re.search(r"restarting it in 0(\.25)? s", server.log)
    assert server.get("/readyz")[0] == 200, "who measures is not who answers"
    until(lambda: is_up(server) == 1, "a reference, without another sample")
    ask_until(server, "measured")
    until(lambda: count() == samples(server, "measured") > 12, "it measures")

    (second,) = pids(server, SHADOW)
    server.stop()
    until(lambda: not alive(second), "no process left behind")


DYING = """
import os, signal, sys
if "bf16kit.service.shadow.references" in sys.orig_argv:
    def look(event, given):
        if event == "open" and "/bad/1/" in str(given[0]):
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(look)
"""


def test_a_reference_that_crashes_the_shadow_three_times_turns_it_off_and_serving_goes_on(
    tmp_path: Path, serve: Serve
) -> None:
    for model in ("bad", "mlp"):
        put(tmp_path / "repository", model)
    (tmp_path / "sitecustomize.py").write_text(DYING)
    environment = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    server = serve("--repository", tmp_path / "repository", env=environment).wait_ready()
    ask(server, "bad")
    until(lambda: is_up(server, "bad") == 0, "down, from the first sample on")
    off = "died 3 times within 10 minutes and stays off"
    until(lambda: off in server.log, "off")
    assert "model 'bad' version 1 (being loaded). Set shadow.rate: 0 for the model that ends it" in server.log
    assert server.log.count(STARTED) == 3
    for model in ("mlp", "bad"):
        failed = max(0, samples(server, "failed", model)) + 2
        assert ask(server, model) < 5
        until(lambda model=model, failed=failed: samples(server, "failed", model) == failed)  # type: ignore[misc]
        assert is_up(server, model) == 0
    assert off in server.get("/status.json")[1]
    assert server.get("/readyz")[0] == 200
    assert (pids(server, SHADOW), server.log.count(STARTED)) == ([], 3)


def test_requests_are_in_no_file_and_in_no_log_and_a_killed_server_leaves_no_process(
    tmp_path: Path, serve: Serve
) -> None:
    put(tmp_path / "repository", "mlp")
    (tmp_path / "tmp").mkdir()
    environment = {"TMPDIR": str(tmp_path / "tmp"), "BF16KIT_LOG_LEVEL": "debug"}
    server = serve("--repository", tmp_path / "repository", env=environment).wait_ready()
    before = sorted(tmp_path.rglob("*"))
    ask(server, rows=np.full((1, 16), 12345.678, np.float32))
    until(lambda: samples(server, "measured") == 1)
    assert sorted(tmp_path.rglob("*")) == before
    assert "12345" not in server.log
    (shadow,) = pids(server, SHADOW)
    held = [str(file.readlink()) for file in Path(f"/proc/{shadow}/fd").iterdir()]
    assert not [name for name in held if "bf16kit-sample" in name], "what was measured is given back"
    server.process.kill()
    until(lambda: not alive(shadow), "its end")


def test_a_reference_that_is_off_or_takes_too_much_memory_affects_no_request_and_no_other_reference(
    tmp_path: Path, serve: Serve
) -> None:
    """A run of the greedy one takes 8 GiB, which the system refuses: the samples fail, and nothing is killed."""
    put(tmp_path, "mlp")
    put(tmp_path, "off", rate=0)
    put(tmp_path, "greedy", write_greedy)
    server = serve("--repository", tmp_path).wait_ready()
    for model in ("off", "greedy", "mlp"):
        ask(server, model)
    until(lambda: samples(server, "measured") == 2)
    until(lambda: samples(server, "failed", "greedy") == 2)
    assert is_up(server, "greedy") == 0
    assert "model 'greedy' version 1: the fp32 reference is unloaded, because a run of it exceeded" in server.log
    before = pids(server, SHADOW)
    for model, outcome in (("greedy", "failed"), ("mlp", "measured")):
        ask(server, model)
        until(lambda model=model, outcome=outcome: samples(server, outcome, model) == 4)  # type: ignore[misc]
    assert (pids(server, SHADOW), server.log.count(STARTED)) == (before, 1)
    assert [samples(server, outcome, "off") for outcome in ("measured", "dropped", "failed")] == [0, 0, 0]
    assert (is_up(server, "off"), is_up(server)) == (-1, 1)
    assert server.get("/readyz")[0] == 200
