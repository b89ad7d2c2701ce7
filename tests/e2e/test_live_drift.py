"""Live drift of a real server: the process with the fp32 references, and what the server does without it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_mlp
from loopback import Gate, LoopbackModel, infer_request, serving
from serverprocess import Serve, ServerProcess
from tlsfiles import Authority
from waiting import until as until_within
from workerprocesses import Client, alive, pids

from bf16kit.numerics.tensors import Array, TensorSpec
from service.config.certificates import CertificateFiles
from service.drift.shadow import QUEUE_SIZE

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


def put(repository: Path, model: str, shadow: str = "") -> None:
    write_mlp(repository / model / "1")
    (repository / model / "serving.yaml").write_text(f"shadow: {{{EVERYTHING}{shadow}}}\n")


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
def test_a_reference_that_crashes_the_shadow_twice_stays_off_and_others_are_measured(
    tmp_path: Path, serve: Serve
) -> None:
    for model in ("bad", "mlp"):
        put(tmp_path / "repository", model)
    (tmp_path / "sitecustomize.py").write_text(DYING)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    server = serve("--repository", str(tmp_path / "repository"), env=environment).wait_ready()
    ask(server, "bad")
    until(lambda: metric(server, "reference_up", "bad") == 0, "down, from the first sample on")
    ask(server)
    off = "the process that measures died 2 times in a row while the fp32 reference of this model was being loaded"
    until(lambda: f"model 'bad' version 1: no live drift: {off}" in server.log, "left off")
    assert server.log.count("the shadow is started") <= 3
    ask_until(server, "measured", ROWS)
    assert metric(server, "reference_up") == 1
    ask(server, "bad")
    until(lambda: samples(server, "failed", "bad") >= 4, "counted, and not waited for")
    assert metric(server, "reference_up", "bad") == 0
    assert off in server.get("/status.json")[1]
    (process,) = pids(server, SHADOW)
    ask(server, "bad")
    until(lambda: samples(server, "failed", "bad") >= 6)
    assert pids(server, SHADOW) == [process], "it is asked nothing more of that model"


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


@pytest.fixture
def several(tmp_path: Path, serve: Serve) -> ServerProcess:
    """Start a server of four models: reference off, too large, too large once loaded, and normal."""
    put(tmp_path, "off", ", reference: off")
    put(tmp_path, "large", ", reference_memory_bytes: 1000")
    put(tmp_path, "grown", ", reference_memory_bytes: 3000")
    put(tmp_path, "mlp")
    return serve("--repository", str(tmp_path)).wait_ready()


@pytest.mark.long
def test_a_reference_that_is_off_or_over_its_memory_does_not_affect_the_others(several: ServerProcess) -> None:
    for model in ("off", "large", "grown", "mlp"):
        ask(several, model)
    until(lambda: samples(several, "measured") == 2)
    for model in ("large", "grown"):
        until(lambda model=model: samples(several, "failed", model) == 2)  # type: ignore[misc]
        assert metric(several, "reference_up", model) == 0
    assert "model 'large' version 1: no live drift: the fp32 reference cannot be loaded: its weights are 2048" in (
        several.log
    )
    assert "over shadow.reference_memory_bytes 3000, and was unloaded; drift of this model is not" in several.log
    assert [samples(several, outcome, "off") for outcome in ("measured", "dropped", "failed")] == [0, 0, 0]
    assert metric(several, "reference_up", "off") == -1
    assert metric(several, "reference_up") == 1
    assert several.get("/readyz")[0] == 200


class Slow:
    """A reference on another server, with the outputs of the first model. The test can hold it."""

    def __init__(self, answer: Array) -> None:
        self.gate = Gate()
        self.gate.go.set()
        self._answer = answer

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        self.gate(feeds)
        return {"y": np.repeat(self._answer[:1], len(feeds["x"]), axis=0)}


@pytest.mark.long
def test_a_remote_reference_may_be_slow_or_unavailable(tmp_path: Path, serve: Serve) -> None:
    artifact = write_mlp(tmp_path / "elsewhere" / "1")
    golden = artifact.golden()
    one = golden.inputs["x"][:1]
    slow = Slow(golden.outputs["y"])
    remote = LoopbackModel(
        "theirs",
        slow,
        inputs=(TensorSpec("x", "float32", ("batch", 16)),),
        outputs=(TensorSpec("y", "float32", ("batch", 16)),),
    )
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    with serving(remote, certificates=CertificateFiles(pair.certificate, pair.key)) as other:
        put(tmp_path / "repository", "mlp", f", reference: 'grpcs://{other.address}/theirs/1'")
        environment = {**os.environ, "BF16KIT_REFERENCE_CA": str(authority.certificate)}
        server = serve("--repository", str(tmp_path / "repository"), env=environment).wait_ready()
        ask(server, rows=one)
        until(lambda: samples(server, "measured") == 1)
        assert remote.calls == 1
        assert metric(server, "reference_up") == 1
        ratio = 'bf16kit_drift_budget_ratio{metric="relative_l2",model="mlp",output="y",version="1"}'
        assert 0 < server.metric(ratio) < 1
        slow.gate.go.clear()
        ask_until(server, "dropped", one)
        slow.gate.go.set()
        until(lambda: samples(server, "measured") >= 1 + QUEUE_SIZE, "what waited is measured")
        other.registry.change(remote, "unavailable")
        ask_until(server, "failed", one)
        assert metric(server, "reference_up") == 0
        assert server.get("/readyz")[0] == 200
        other.registry.change(remote, "ready")

        def back() -> bool:
            ask(server, rows=one)
            return metric(server, "reference_up") == 1

        until(back, "asked again, and up")
    assert "cannot serve as the fp32 reference: NOT_FOUND" in server.log
