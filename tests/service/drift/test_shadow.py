from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from driftmetrics import DriftMetrics
from waiting import until

from bf16kit.drift.metrics import Budget
from bf16kit.messages.errors import ArtifactError, RuntimeFailure, Unavailable
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Array
from service.drift.breachevidence import EvidenceRecorder
from service.drift.comparison import Comparison, Drifts
from service.drift.sampler import Sample
from service.drift.shadow import MAX_BYTES, NICENESS, QUEUE_SIZE, Measuring, Shadow
from service.drift.verdict import DriftVerdict

SPECS = (TensorSpec("y", "float32", ("batch", 2), "embedding"),)


class Reference:
    """A reference with y = x, exactly. A test can hold its runs, or have them fail with ``error``.

    ``nice`` is the niceness of the thread that ran it.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.up = True
        self.nice: int | None = None
        self.running = False
        self.closed = False
        self.error: Exception | None = None

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str], *, seconds: float) -> dict[str, Array]:
        self.nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.running = True
        assert self.gate.wait(20)
        if self.error is not None:
            self.up = not isinstance(self.error, Unavailable)
            raise self.error
        assert feeds["x"].flags.c_contiguous
        return {"y": feeds["x"].copy()}

    def close(self) -> None:
        self.closed = True


class Heard(DriftMetrics):
    """Metrics that also count samples by their outcome."""

    def __init__(self) -> None:
        super().__init__(*SPECS)
        self.outcomes: Counter[str] = Counter()

    def put(self, shadow: Shadow, rows: int = 1, error: float = 0.0, nbytes: int = 16) -> None:
        """Have a sample measured, and count its rows by outcome."""
        self.offer(shadow, sample(rows, error, nbytes))

    def offer(self, shadow: Shadow, each: Sample) -> None:
        shadow.put(each, lambda outcome: self.outcomes.update({outcome: each.rows}))


class Recorder(EvidenceRecorder):
    """Records what it is told: the drift of a sample's row, or a restart."""

    def __init__(self) -> None:
        super().__init__(0, Budget(), {})
        self.told: list[float | str] = []

    def restart(self) -> None:
        self.told.append("restart")

    def record(self, expected: object, sample: Sample, drifts: Drifts, verdict: DriftVerdict) -> None:
        self.told.append(round(drifts["y"][0].relative_l2, 4))


Make = Callable[..., Shadow]


@pytest.fixture
def reference() -> Reference:
    return Reference()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def make(reference: Reference, heard: Heard) -> Iterator[Make]:
    shadows: list[Shadow] = []

    def build(
        load: Callable[[], Reference] = lambda: reference, recorder: EvidenceRecorder | None = None, **options: Any
    ) -> Shadow:
        comparison = Comparison(SPECS, 0, Budget())
        shadow = Shadow(lambda: Measuring(load(), comparison, recorder), heard.model, name="m", **options)
        shadow.start()
        shadows.append(shadow)
        return shadow

    yield build
    reference.gate.set()
    for shadow in shadows:
        shadow.stop()


def sample(rows: int = 1, error: float = 0.0, nbytes: int = 16) -> Sample:
    x = np.ones((rows, 2), np.float32)
    return Sample({"x": x}, {"y": x * np.float32(1 + error)}, rows, nbytes)


def test_a_live_response_is_compared_with_the_reference_row_by_row(make: Make, heard: Heard) -> None:
    """The time of the measurement is set before others are told of it."""
    told: list[float | None] = []
    begun = time.time()
    heard.put(
        make(on_measured=lambda verdict: told.append(heard.value("last_sample_timestamp_seconds"))), rows=3, error=0.03
    )
    until(lambda: heard.outcomes["measured"] == 3)
    assert heard.rows() == 3
    assert heard.ratio("relative_l2")[0] == pytest.approx(2.0, rel=1e-3)
    assert (heard.ratio("nonfinite")[0], heard.value("reference_up")) == (0, 1)
    assert begun <= (told[0] or 0) <= time.time()


def test_the_reference_is_loaded_as_others_are_and_runs_with_low_priority(
    make: Make, heard: Heard, reference: Reference
) -> None:
    """A full machine leaves a thread of low priority too little to load a model, and niceness cannot be taken back."""
    before, loading = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), list[int]()

    def load() -> Reference:
        loading.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return reference

    heard.put(make(load))
    until(lambda: heard.outcomes["measured"])
    assert loading == [before]
    assert reference.nice == max(NICENESS, before)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_a_full_queue_drops_and_counts_and_never_blocks(make: Make, heard: Heard, reference: Reference) -> None:
    reference.gate.clear()
    shadow = make()
    heard.put(shadow)
    until(lambda: reference.running)
    for _ in range(QUEUE_SIZE + 2):
        heard.put(shadow)
    assert heard.outcomes == {"dropped": 3}
    reference.gate.set()
    until(lambda: heard.outcomes["measured"] == QUEUE_SIZE)


def test_samples_that_wait_are_bounded_by_their_bytes(make: Make, heard: Heard, reference: Reference) -> None:
    reference.gate.clear()
    shadow = make()
    for _ in range(4):
        heard.put(shadow, nbytes=MAX_BYTES // 3)
    assert heard.outcomes == {"dropped": 1}
    reference.gate.set()
    until(lambda: heard.outcomes["measured"] == 3)
    heard.put(shadow, nbytes=MAX_BYTES + 1)  # alone, and still too large
    heard.put(shadow, nbytes=MAX_BYTES)
    until(lambda: heard.outcomes == {"measured": 4, "dropped": 2})


def test_samples_that_wait_when_the_shadow_is_stopped_are_dropped(
    make: Make, heard: Heard, reference: Reference
) -> None:
    reference.gate.clear()
    shadow = make()
    heard.put(shadow)
    until(lambda: reference.running)
    heard.put(shadow, rows=2)
    shadow.stop()
    heard.put(shadow)
    assert heard.outcomes == {"dropped": 1}
    reference.gate.set()
    until(lambda: heard.outcomes == {"dropped": 3, "measured": 1})
    until(lambda: reference.closed)


def test_a_restart_takes_effect_after_the_samples_that_were_put_before_it(
    make: Make, heard: Heard, reference: Reference
) -> None:
    reference.gate.clear()
    recorder = Recorder()
    shadow = make(recorder=recorder)
    heard.put(shadow, error=0.03)
    until(lambda: reference.running)
    heard.put(shadow, error=0.03)
    shadow.restart()
    heard.put(shadow, error=0.015)
    reference.gate.set()
    until(lambda: heard.outcomes["measured"] == 3)
    assert heard.ratio("relative_l2")[0] == pytest.approx(1.0, rel=1e-3)
    assert recorder.told == [0.03, 0.03, "restart", 0.015]


def test_samples_that_fail_are_counted_and_the_next_is_measured(
    make: Make, heard: Heard, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the reference is logged without a traceback, and a bug with one."""
    shadow = make()
    reference.error = RuntimeFailure("ONNX Runtime failed: dimensions")
    heard.put(shadow)
    until(lambda: heard.outcomes["failed"])
    reference.error = None
    wrong = sample()
    heard.offer(shadow, replace(wrong, feeds={"wrong": wrong.feeds["x"]}))
    heard.put(shadow)
    until(lambda: heard.outcomes["measured"])
    assert heard.outcomes == {"failed": 2, "measured": 1}
    assert "a shadow sample failed: ONNX Runtime failed: dimensions" in caplog.text
    assert [record.exc_info is None for record in caplog.records if "failed" in record.getMessage()] == [True, False]


def test_without_a_reference_every_sample_fails(make: Make, heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    def load() -> Reference:
        raise ArtifactError("no residual")

    heard.put(make(load))
    until(lambda: heard.outcomes["failed"] == 1)
    assert "no live drift: the fp32 reference cannot be loaded: no residual" in caplog.text
    assert heard.value("reference_up") is None


def test_samples_fail_quietly_while_the_reference_is_away_and_its_state_is_reported(
    make: Make, heard: Heard, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    reference.error = Unavailable("the fp32 reference was unloaded")
    shadow = make()
    heard.put(shadow)
    heard.put(shadow)
    until(lambda: heard.outcomes["failed"] == 2)
    assert heard.value("reference_up") == 0
    reference.up, reference.error = True, None
    heard.put(shadow)
    until(lambda: heard.outcomes["measured"] == 1)
    assert heard.value("reference_up") == 1
    assert "failed" not in caplog.text


def test_a_shadow_that_is_stopped_while_it_loads_frees_the_reference(make: Make, reference: Reference) -> None:
    loading = threading.Event()

    def load() -> Reference:
        loading.set()
        assert reference.gate.wait(20)
        return reference

    reference.gate.clear()
    shadow = make(load)
    assert loading.wait(20)
    begun = time.monotonic()
    shadow.stop()
    assert time.monotonic() - begun < 10, "it waits for nothing"
    reference.gate.set()
    until(lambda: reference.closed)
