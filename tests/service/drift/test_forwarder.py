"""Samples that fp32 has served are run on bf16 before they are measured; test_sampler.py has the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from waiting import until

from bf16kit.messages.errors import RuntimeFailure
from service.contract import Array
from service.drift.forwarder import Probe
from service.drift.sampler import OutcomeObserver, Sample

X = np.ones((2, 3), np.float32)
ANSWERED = Sample({"x": X}, {"y": X * 5}, 2, 48, probability=0.25, precision="bf16-weights")
BY_FP32 = replace(ANSWERED, precision="fp32")


class Rig:
    """A probe whose bf16 run is a function that a test can hold or make fail."""

    def __init__(self) -> None:
        self.handed: list[Sample] = []
        self.counted: list[tuple[str, int]] = []
        self.forgotten = False
        self.go = threading.Event()
        self.go.set()
        self.at_work = False
        self.fails: Exception | None = None
        self.probe = Probe("m", "bf16-weights", self._run, self)

    def _run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> tuple[dict[str, Array], str]:
        self.at_work = True
        assert self.go.wait(30)
        if self.fails is not None:
            raise self.fails
        return dict.fromkeys(outputs, feeds["x"] * 2), "bf16-weights"

    def send(self, sample: Sample, observer: OutcomeObserver) -> None:
        self.handed.append(sample)

    def finish(self) -> None:
        self.forgotten = True

    def offer(self, sample: Sample) -> None:
        self.probe.send(sample, self)

    def sampled(self, outcome: Literal["measured", "dropped", "failed"], samples: int) -> None:
        self.counted.append((outcome, samples))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.go.set()
    assert rig.probe.close()


def test_a_sample_served_by_bf16_is_passed_on_unchanged(rig: Rig) -> None:
    rig.offer(ANSWERED)
    assert rig.handed == [ANSWERED]


def test_a_sample_served_by_fp32_is_passed_on_with_the_outputs_of_bf16(rig: Rig) -> None:
    rig.offer(BY_FP32)
    until(lambda: rig.handed != [], 30, "handed on")
    (sample,) = rig.handed
    np.testing.assert_array_equal(sample.outputs["y"], X * 2)
    assert (sample.precision, sample.probability, sample.rows) == ("bf16-weights", 0.25, 2)
    assert rig.counted == []


@pytest.mark.parametrize("error", [RuntimeFailure("no"), ZeroDivisionError()])
def test_a_sample_that_fails_is_counted_and_the_next_is_measured(rig: Rig, error: Exception) -> None:
    rig.fails = error
    rig.offer(BY_FP32)
    until(lambda: rig.counted == [("failed", 2)], 30, "counted")
    rig.fails = None
    rig.offer(BY_FP32)
    until(lambda: len(rig.handed) == 1, 30, "measured")


def test_a_closed_probe_drops_samples(rig: Rig) -> None:
    assert rig.probe.close()
    rig.offer(BY_FP32)
    assert rig.counted == [("dropped", 2)]


def test_samples_that_wait_when_the_probe_is_stopped_are_dropped_and_counted(rig: Rig) -> None:
    rig.go.clear()
    rig.offer(BY_FP32)
    until(lambda: rig.at_work, 30, "at work")
    for _ in range(3):
        rig.offer(BY_FP32)
    rig.probe.stop()
    rig.probe.stop()
    assert not rig.probe.close(time.monotonic())
    rig.go.set()
    assert rig.probe.close()
    assert (len(rig.handed), rig.counted) == (1, [("dropped", 2)] * 3)


@pytest.mark.parametrize("another", [False, True])
def test_if_no_thread_can_be_started_only_the_sample_is_dropped(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    """The client has its response by then. A probe that is closed then has nothing to wait for."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", refuse)
        rig.offer(BY_FP32)
    assert rig.counted == [("dropped", 2)]
    if another:
        rig.offer(BY_FP32)
        until(lambda: len(rig.handed) == 1, 30, "measured")
    assert rig.probe.close()


def test_forget_is_passed_on(rig: Rig) -> None:
    rig.probe.finish()
    assert rig.forgotten
