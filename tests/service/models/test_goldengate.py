"""The golden gate of a served model, and damage that only the gate can detect."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts import write_mlp, write_product, write_words
from sessions import recorded_sessions
from waiting import until

from bf16kit.messages.errors import BudgetExceeded, InputRefused, RuntimeFailure
from bf16kit.service.contract import GATE_FAILED, infer
from bf16kit.service.drift.contract import DriftVerdict
from bf16kit.service.drift.sampler import NICENESS
from bf16kit.service.models import goldengate, loading
from bf16kit.service.models.generation import Generation
from bf16kit.service.models.goldengate import GoldenGate
from bf16kit.service.models.repository import golden_schedule, run_due_gates
from bf16kit.service.models.serving import Serving
from bf16kit.service.request import Request
from bf16kit.service.telemetry.metrics import Metrics

ONE = Request({"x": np.ones((1, 64), np.float32)}, rows=1)


class Made:
    """A served model, and the verdicts that its gate reported."""

    def __init__(self, path: Path, **serving: object) -> None:
        self.metrics = Metrics()
        self.heard: list[DriftVerdict] = []
        asked = Serving.model_validate({"shadow": {"rate": 0}, **serving})
        self.loaded = loading.load(path, asked, device="cpu", threads=1)
        series = self.metrics.add("m", 1)
        self.model = Generation("m", 1, self.loaded, asked, lambda: series, on_verdict=self.heard.append)

    def gauge(self, name: str) -> float:
        lines = self.metrics.expose()[0].decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"bf16kit_golden_gate_{name}"))

    def runs(self, outcome: str) -> float:
        return self.gauge(f'runs_total{{model="m",outcome="{outcome}"')

    @property
    def gate(self) -> GoldenGate:
        return self.model.gate


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Made]]:
    made: list[Made] = []

    def build(write: Callable[[Path], object] = write_product, **serving: object) -> Made:
        write(tmp_path / "m" / "1")
        made.append(Made(tmp_path / "m" / "1", **serving))
        return made[-1]

    yield build
    for each in made:
        assert each.model.close(time.monotonic() + 20)


def test_a_healthy_model_reports_when_its_gate_ran_last(make: Callable[..., Made]) -> None:
    made = make()
    assert made.model.golden.startswith("golden samples within budget (y relative_l2")
    assert (made.gauge("passed"), made.runs("passed"), made.runs("failed")) == (1, 1, 0)
    before = made.gauge("timestamp_seconds")
    assert made.gate.run("on schedule") == "passed"
    assert "run again 20" in made.model.golden
    assert (made.gauge("passed"), made.runs("passed")) == (1, 2)
    assert made.gauge("timestamp_seconds") >= before
    assert made.heard == []


@pytest.mark.parametrize(("serving", "most"), [({}, 8), ({"max_batch_size": 3}, 3), ({"max_batch_size": 0}, 8)])
def test_golden_samples_run_a_few_rows_at_a_time(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch, serving: dict[str, object], most: int
) -> None:
    rows = list[int]()

    def ran(feeds: Mapping[str, Any]) -> None:
        if feeds["x"].shape[1] == 16:  # the model's, not the probe's
            rows.append(len(feeds["x"]))

    def write(path: Path) -> None:
        write_mlp(path, golden_rows=20)
        recorded_sessions(monkeypatch, runs=ran)

    made = make(write, **serving)
    expected = [min(most, 20 - start) for start in range(0, 20, most)]
    assert rows == [1, *expected]  # the warm-up, and the gate of loading
    rows.clear()
    assert made.gate.run("on schedule") == "passed"
    assert rows == expected


def test_a_breach_is_found_in_all_rows_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages name the mean over all rows, so they show which rows were judged."""
    write_mlp(tmp_path / "m" / "1", golden_rows=20, spoil=0.1)
    found = []
    for rows in (8, 1000):
        monkeypatch.setattr(goldengate, "GOLDEN_ROWS", rows)
        with pytest.raises(BudgetExceeded) as breach:
            loading.load(tmp_path / "m" / "1", Serving(), device="cpu", threads=1)
        found.append(str(breach.value))
    assert found[0] == found[1]


def test_results_that_differ_from_the_golden_samples_fail_the_gate_until_they_agree_again(
    make: Callable[..., Made], caplog: pytest.LogCaptureFixture
) -> None:
    made = make()
    assert made.loaded.samples is not None
    expected = made.loaded.samples.outputs["y"]
    expected *= -1
    for reports in (1, 2):
        assert made.gate.run("on schedule") == "failed"
        assert len(made.heard) == reports, "for as long as it fails"
    verdict = made.heard[0]
    assert (verdict.model, verdict.version, verdict.state, verdict.cause) == ("m", 1, "over", "broken")
    assert verdict.low > 1
    assert made.model.golden.startswith(f"{GATE_FAILED} 20")
    assert "output 'y': relative_l2 is" in made.model.golden
    assert (made.gauge("passed"), made.runs("failed")) == (0, 2)
    assert "golden gate failed on schedule: golden samples are over the drift budget: output 'y'" in caplog.text
    assert infer(made.model, ONE).outputs["y"].shape == (1, 64), "it goes on answering"
    expected *= -1
    assert made.gate.run("again") == "passed"
    assert (made.gauge("passed"), GATE_FAILED in made.model.golden) == (1, False)


def test_a_failed_gate_counts_although_the_wall_clock_was_set_back(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts from before the load are ignored, and this one must not look like one of them."""
    made, now = make(), time.time
    assert made.loaded.samples is not None
    made.loaded.samples.outputs["y"] *= -1
    monkeypatch.setattr(time, "time", lambda: now() - 86_400)
    assert made.gate.run("on schedule") == "failed"
    assert made.heard[0].at >= made.model.since


def test_samples_that_cannot_be_run_are_reported_after_the_second_error(
    make: Callable[..., Made], caplog: pytest.LogCaptureFixture
) -> None:
    """A single error may be a short lack of memory."""
    made = make()
    made.loaded.runtime.close()
    assert made.gate.run("on schedule") == "error"
    assert (made.heard, made.gauge("passed"), made.runs("error")) == ([], 0, 1)
    assert made.model.golden.startswith(GATE_FAILED)
    assert "closed" not in made.model.golden, "what a runtime says is for the log"
    assert "closed" in caplog.text
    assert made.gate.run("again") == "error"
    assert [(verdict.state, verdict.cause) for verdict in made.heard] == [("over", "broken")]


def test_a_failed_run_triggers_the_gate_unless_its_inputs_are_the_cause(make: Callable[..., Made]) -> None:
    made = make(golden_seconds=0)
    later = time.monotonic() + 1e6
    assert not made.gate.timetable.due_reason(later)
    for error, due in ((InputRefused("index", "index"), False), (RuntimeFailure("a device error"), True)):
        _fail(made, error)
        with pytest.raises(Exception, match=r"index|device"):
            infer(made.model, ONE)
        assert bool(made.gate.timetable.due_reason(later)) is due


def test_a_model_without_golden_samples_has_no_gate(make: Callable[..., Made], tmp_path: Path) -> None:
    made = make(write_words)
    made.gate.note_failed_run()
    assert not made.gate.timetable.due_reason(time.monotonic() + 1e6)
    assert "bf16kit_golden_gate_passed{" not in made.metrics.expose()[0].decode()


def test_the_schedule_runs_only_the_gates_that_are_due(make: Callable[..., Made]) -> None:
    due, quiet, told = make(golden_seconds=60), make(lambda path: None, golden_seconds=0), list[int]()
    now = time.monotonic() + 60
    for _ in range(2):
        run_due_gates([due.model, quiet.model], lambda: told.append(1), lambda: now)
    assert (due.runs("passed"), quiet.runs("passed"), len(told)) == (2, 1, 1)
    due.model.leases.end()
    run_due_gates([due.model], lambda: told.append(1), lambda: now + 1e6)
    assert (due.runs("passed"), len(told)) == (2, 1), "it is being unloaded"


@pytest.mark.long
def test_the_schedules_thread_has_low_priority_and_ends(make: Callable[..., Made]) -> None:
    made, nice = make(golden_seconds=1), list[int]()
    schedule = golden_schedule(
        lambda: [made.model], lambda: nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    )
    schedule.start()
    until(lambda: nice, 30, "a gate on schedule")
    schedule.stop()
    assert nice[0] == NICENESS


def _fail(made: Made, error: Exception) -> None:
    """Make every further run of the model fail with ``error``."""

    def run(*given: object, **more: object) -> dict[str, object]:
        raise error

    made.loaded.runtime.run = run  # type: ignore[method-assign, assignment]
