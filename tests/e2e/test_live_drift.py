"""Live drift of a real server: what is kept of requests, and references that are off or too large."""

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


def ask(server: ServerProcess, model: str = "mlp", rows: Array = ROWS) -> None:
    with Client(server.target) as client:
        client.infer(model, x=rows)


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
    assert "INFO bf16kit.service.shadow.references: model 'mlp' version 1: its fp32 reference" in server.log
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
