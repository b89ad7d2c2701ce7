"""Live drift of a real server: the process with the fp32 references, and what the server does without it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_greedy, write_mlp
from loopback import infer_request
from serverprocess import Serve, ServerProcess
from waiting import until as until_within
from workerprocesses import Client, alive, pids

from bf16kit.numerics.tensors import Array

SHADOW = "service.shadow.references"
PATIENCE_S = 90  # the process has a low priority, and other tests use the processor meanwhile
ROWS = np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)
EVERYTHING = "rate: 1, max_per_second: 1000"


def until(condition: Callable[[], object], what: str = "the condition") -> None:
    until_within(condition, PATIENCE_S, what)


def samples(server: ServerProcess, outcome: str, model: str = "mlp") -> float:
    return server.metric(f'bf16kit_drift_samples_total{{model="{model}",outcome="{outcome}",version="1"}}')


def metric(server: ServerProcess, name: str, model: str = "mlp") -> float:
    return server.metric(f'bf16kit_drift_{name}{{model="{model}",version="1"}}')


def put(repository: Path, model: str) -> None:
    write_mlp(repository / model / "1")
    (repository / model / "serving.yaml").write_text(f"shadow: {{{EVERYTHING}}}\n")


def ask(server: ServerProcess, model: str = "mlp", rows: Array = ROWS, times: int = 1) -> float:
    """Send requests; return the longest time to a response, in seconds."""
    client, seconds = Client(server.target), [0.0]
    with client.channel:
        for _ in range(times):
            begun = time.monotonic()
            client.call("ModelInfer", infer_request(model, x=rows))
            seconds.append(time.monotonic() - begun)
    return max(seconds)


def ask_until(server: ServerProcess, outcome: str, rows: Array) -> None:
    """Send requests until a sample has this outcome; check that no request is delayed meanwhile."""

    def counted() -> bool:
        slowest = ask(server, rows=rows, times=30)
        assert slowest < 5
        return samples(server, outcome) > 0

    until(counted, f"a sample that is {outcome}")


@pytest.mark.long
def test_a_stopped_and_killed_shadow_is_replaced_and_its_lost_samples_are_counted(tmp_path: Path, serve: Serve) -> None:
    put(tmp_path, "mlp")
    server = serve("--repository", str(tmp_path)).wait_ready()
    assert (pids(server, SHADOW), metric(server, "reference_up")) == ([], -1), "before the first sample"
    ask(server, times=3)
    until(lambda: samples(server, "measured") == 6)
    count = 'bf16kit_drift_relative_l2_count{model="mlp",output="y",version="1"}'
    assert server.metric(count) == 6
    assert metric(server, "reference_up") == 1
    last = metric(server, "last_sample_timestamp_seconds")
    assert abs(last - time.time()) < 2 * PATIENCE_S
    (first,) = pids(server, SHADOW)

    os.kill(first, signal.SIGSTOP)  # the shadow reads nothing now: the queue is bounded, and no request waits for it
    ask_until(server, "dropped", ROWS)
    os.kill(first, signal.SIGKILL)
    until(lambda: samples(server, "failed") >= 2 * 16, "what was with it is counted")
    assert server.metric(count) == 6, "what it had counted stays"
    assert metric(server, "last_sample_timestamp_seconds") == last
    until(lambda: pids(server, SHADOW) not in ([], [first]), "another in its place")
    assert re.search(r"restarting it in 0(\.25)? s", server.log)
    until(lambda: metric(server, "reference_up") == 1, "a reference, without another sample")
    ask_until(server, "measured", ROWS)
    until(lambda: server.metric(count) == samples(server, "measured") > 6, "it measures")

    (second,) = pids(server, SHADOW)
    server.terminate()
    assert server.exit_code() == 0
    until(lambda: not alive(second), "no process left behind")


DYING = """
import os, signal, sys
if "service.shadow.references" in sys.orig_argv:
    def look(event, given):
        if event == "open" and "/bad/1/" in str(given[0]):
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(look)
"""


@pytest.mark.long
def test_a_reference_that_crashes_the_shadow_three_times_turns_it_off_and_serving_goes_on(
    tmp_path: Path, serve: Serve
) -> None:
    for model in ("bad", "mlp"):
        put(tmp_path / "repository", model)
    (tmp_path / "sitecustomize.py").write_text(DYING)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    server = serve("--repository", str(tmp_path / "repository"), env=environment).wait_ready()
    ask(server, "bad")
    until(lambda: metric(server, "reference_up", "bad") == 0, "down, from the first sample on")
    off = "died 3 times within 10 minutes and stays off"
    until(lambda: off in server.log, "off")
    assert "model 'bad' version 1 (being loaded). Set shadow.rate: 0 for the model that ends it" in server.log
    assert server.log.count("the shadow is started") == 3
    for model, failed in (("mlp", 2), ("bad", samples(server, "failed", "bad") + 2)):
        assert ask(server, model) < 5
        until(lambda model=model, failed=failed: samples(server, "failed", model) == failed)  # type: ignore[misc]
        assert metric(server, "reference_up", model) == 0
    assert off in server.get("/status.json")[1]
    assert server.get("/readyz")[0] == 200
    assert (pids(server, SHADOW), server.log.count("the shadow is started")) == ([], 3)


@pytest.mark.long
def test_a_full_machine_still_loads_and_measures(tmp_path: Path, serve: Serve) -> None:
    """Ten busy threads on each processor, in this session: elsewhere the kernel may weigh them by session."""
    put(tmp_path, "mlp")
    server = serve("--repository", str(tmp_path)).wait_ready()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(10 * (os.cpu_count() or 1))]
    try:
        ask(server)
        until(lambda: metric(server, "reference_up") == 1, "the reference")
        measured = samples(server, "measured")
        ask(server, times=5)
        until(lambda: samples(server, "measured") > measured, "a sample")
    finally:
        for each in busy:
            each.kill()
            each.wait()


@pytest.mark.long
def test_a_killed_server_leaves_no_process_behind(tmp_path: Path, serve: Serve) -> None:
    put(tmp_path, "mlp")
    server = serve("--repository", str(tmp_path)).wait_ready()
    ask(server)
    until(lambda: samples(server, "measured") == 2)
    (shadow,) = pids(server, SHADOW)
    server.process.kill()
    until(lambda: not alive(shadow), "its end")


@pytest.mark.long
def test_requests_are_in_no_file_and_in_no_log(tmp_path: Path, serve: Serve) -> None:
    repository, temporary = tmp_path / "repository", tmp_path / "tmp"
    put(repository, "mlp")
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "BF16KIT_LOG_LEVEL": "debug"}
    server = serve("--repository", str(repository), env=environment).wait_ready()
    before = sorted(tmp_path.rglob("*"))
    ask(server, rows=np.full((1, 16), 12345.678, np.float32))
    until(lambda: samples(server, "measured") == 1)
    assert sorted(tmp_path.rglob("*")) == before
    assert "12345" not in server.log
    (shadow,) = pids(server, SHADOW)
    held = [str(file.readlink()) for file in Path(f"/proc/{shadow}/fd").iterdir()]
    assert not [name for name in held if "bf16kit-sample" in name], "what was measured is given back"


@pytest.mark.long
def test_a_reference_that_is_off_or_takes_too_much_memory_affects_no_request_and_no_other_reference(
    tmp_path: Path, serve: Serve
) -> None:
    """A run of the greedy one takes 8 GiB, which the system refuses: the samples fail, and nothing is killed."""
    for model in ("off", "mlp"):
        put(tmp_path, model)
    (tmp_path / "off" / "serving.yaml").write_text("shadow: {rate: 0}\n")
    write_greedy(tmp_path / "greedy" / "1")
    (tmp_path / "greedy" / "serving.yaml").write_text(f"shadow: {{{EVERYTHING}}}\n")
    server = serve("--repository", str(tmp_path)).wait_ready()
    for model in ("off", "greedy", "mlp"):
        ask(server, model)
    until(lambda: samples(server, "measured") == 2)
    until(lambda: samples(server, "failed", "greedy") == 2)
    assert metric(server, "reference_up", "greedy") == 0
    assert "model 'greedy' version 1: the fp32 reference is unloaded, because a run of it exceeded" in server.log
    before = pids(server, SHADOW)
    for model, outcome in (("greedy", "failed"), ("mlp", "measured")):
        ask(server, model)
        until(lambda model=model, outcome=outcome: samples(server, outcome, model) == 4)  # type: ignore[misc]
    assert (pids(server, SHADOW), server.log.count("the shadow is started")) == (before, 1)
    assert [samples(server, outcome, "off") for outcome in ("measured", "dropped", "failed")] == [0, 0, 0]
    assert metric(server, "reference_up", "off") == -1
    assert metric(server, "reference_up") == 1
    assert server.get("/readyz")[0] == 200
