from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import pytest
from waiting import until

from bf16kit.drift import Budget, SampleDrift
from bf16kit.errors import ArtifactError, RuntimeFailure
from bf16kit.runtime import Array, RuntimeInfo
from bf16kit.tensors import TensorSpec
from service.drift.comparison import Comparison
from service.drift.policy import ShadowPolicy
from service.drift.shadow import NICENESS, QUEUE_SIZE, Shadow
from service.request import Reply, Request

SPECS = (TensorSpec("y", "float32", ("batch", 2), "embedding"),)


class Reference:
    """y = x, exactly; held when asked, and telling how nice its thread is."""

    inputs = (TensorSpec("x", "float32", ("batch", 2)),)
    outputs = SPECS
    info = RuntimeInfo("onnxruntime", "cpu", "reference", "fp32", "fp32")

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.nice: int | None = None
        self.running = False
        self.closed = False

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, seconds: float | None = None
    ) -> dict[str, Array]:
        self.nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.running = True
        assert self.gate.wait(20)
        assert feeds["x"].flags.c_contiguous
        return {"y": feeds["x"].copy()}

    def close(self) -> None:
        self.closed = True


class Heard:
    """What the shadow told its observer."""

    def __init__(self) -> None:
        self.samples: Counter[str] = Counter()
        self.drifts: list[SampleDrift] = []
        self.ratios: dict[tuple[str, str], float] = {}

    def sampled(self, outcome: Literal["measured", "dropped", "failed"], samples: int) -> None:
        self.samples[outcome] += samples

    def drift(self, output: str, sample: SampleDrift, weight: float) -> None:
        self.drifts.append(sample)

    def budget_ratio(self, output: str, metric: str, ratio: float, low: float, high: float) -> None:
        self.ratios[output, metric] = ratio

    def recent(self, output: str, effective_samples: float, change_score: float | None) -> None:
        pass

    def changed(self, output: str) -> None:
        pass

    def out_of_range(self, name: str, rows: int) -> None:
        pass

    def judged(self, over: bool, cause: str) -> None:
        pass


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

    def build(load: Callable[[], Reference] = lambda: reference, draw: float = 0.0, **policy: float) -> Shadow:
        chosen = ShadowPolicy.model_validate({"rate": 1.0, "max_per_second": 1000.0, "max_rows": 8, **policy})
        comparison = Comparison(SPECS, 0, Budget())
        shadow = Shadow(load, comparison, chosen, heard, name="m", batch_axis=0, draw=lambda: draw)
        shadow.start()
        shadows.append(shadow)
        return shadow

    yield build
    reference.gate.set()
    for shadow in shadows:
        shadow.close()


def pair(rows: int = 1, error: float = 0.0) -> tuple[Request, Reply]:
    x = np.ones((rows, 2), np.float32)
    return Request({"x": x}, rows=rows), Reply({"y": x * np.float32(1 + error)}, "bf16")


def test_a_live_answer_is_compared_with_the_reference_row_by_row(make: Make, heard: Heard) -> None:
    make().offer(*pair(rows=3, error=0.01))
    until(lambda: heard.samples["measured"] == 3)
    assert [round(d.relative_l2, 4) for d in heard.drifts] == [0.01] * 3


def test_the_budget_ratio_is_recent_drift_over_its_bound(make: Make, heard: Heard) -> None:
    make().offer(*pair(error=0.03))
    until(lambda: heard.samples["measured"])
    assert heard.ratios["y", "relative_l2"] == pytest.approx(2.0, rel=1e-3)
    assert heard.ratios["y", "nonfinite"] == 0


def test_an_answer_that_is_not_finite_is_a_breach_not_a_crash(make: Make, heard: Heard) -> None:
    make().offer(*pair(error=np.inf))
    until(lambda: heard.samples["measured"])
    assert heard.ratios["y", "nonfinite"] == np.inf
    assert heard.drifts[0].nonfinite == 2


def test_the_reference_runs_behind_everything_else(make: Make, heard: Heard, reference: Reference) -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    make().offer(*pair())
    until(lambda: heard.samples["measured"])
    assert reference.nice == NICENESS
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_only_the_chosen_share_is_measured(make: Make, heard: Heard) -> None:
    """Drawing 0.5 chooses at rate 0.6 and not at rate 0.4; what is not chosen is not counted as dropped."""
    make(draw=0.5, rate=0.4).offer(*pair())
    make(draw=0.5, rate=0.6).offer(*pair())
    until(lambda: heard.samples["measured"] == 1)
    assert heard.samples == {"measured": 1}


def test_more_than_max_rows_are_not_measured(make: Make, heard: Heard) -> None:
    make(max_rows=2).offer(*pair(rows=5))
    until(lambda: heard.samples["measured"])
    assert heard.samples == {"measured": 2}


def test_a_full_queue_drops_and_counts_and_never_blocks(make: Make, heard: Heard, reference: Reference) -> None:
    reference.gate.clear()
    shadow = make()
    shadow.offer(*pair())
    until(lambda: reference.running)
    for _ in range(QUEUE_SIZE + 3):
        shadow.offer(*pair())
    assert heard.samples == {"dropped": 3}
    reference.gate.set()
    until(lambda: heard.samples["measured"] == QUEUE_SIZE + 1)


def test_a_sample_holds_its_rows_and_not_the_message_and_the_batch_that_they_came_in(
    make: Make, heard: Heard, reference: Reference
) -> None:
    """A view would keep both alive, and show what became of the memory meanwhile."""
    reference.gate.clear()
    shadow = make(max_rows=2)
    shadow.offer(*pair())
    until(lambda: reference.running)
    message = np.ones((1000, 2), np.float32)
    batch = message * np.float32(1.01)
    alive = weakref.ref(message), weakref.ref(batch)
    shadow.offer(Request({"x": message[:5]}, rows=5), Reply({"y": batch[:5]}, "bf16"))
    message[:], batch[:] = 7, 8
    del message, batch
    assert [array() for array in alive] == [None, None]
    reference.gate.set()
    until(lambda: heard.samples["measured"] == 3)
    assert [round(drift.relative_l2, 4) for drift in heard.drifts] == [0, 0.01, 0.01]


def test_samples_that_wait_are_bounded_by_their_bytes(make: Make, heard: Heard, reference: Reference) -> None:
    """Each row is 8 bytes of input and as many of output."""
    reference.gate.clear()
    shadow = make(max_bytes=48)
    for _ in range(4):
        shadow.offer(*pair())
    assert heard.samples == {"dropped": 1}
    reference.gate.set()
    until(lambda: heard.samples["measured"] == 3)
    until(lambda: not shadow._held)
    shadow.offer(*pair(rows=4))  # alone, and still too large
    shadow.offer(*pair(rows=3))
    until(lambda: heard.samples["measured"] == 6)
    assert heard.samples == {"measured": 6, "dropped": 5}


def test_more_than_max_per_second_are_dropped(make: Make, heard: Heard) -> None:
    shadow = make(max_per_second=0.001)
    shadow.offer(*pair())
    shadow.offer(*pair(rows=2))
    until(lambda: heard.samples["measured"] == 1)
    assert heard.samples == {"measured": 1, "dropped": 2}


def test_a_sample_that_fails_is_counted_and_the_next_is_measured(make: Make, heard: Heard) -> None:
    shadow = make()
    request, reply = pair()
    shadow.offer(Request({"wrong": request.feeds["x"]}, rows=1), reply)
    shadow.offer(request, reply)
    until(lambda: heard.samples["measured"])
    assert heard.samples == {"failed": 1, "measured": 1}


def test_a_reference_that_refuses_a_sample_is_no_bug_and_leaves_no_traceback(
    make: Make, heard: Heard, reference: Reference, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **more: object) -> dict[str, Array]:
        raise RuntimeFailure("ONNX Runtime failed: dimensions")

    monkeypatch.setattr(reference, "run", refuse)
    make().offer(*pair())
    until(lambda: heard.samples["failed"])
    assert "a shadow sample failed: ONNX Runtime failed: dimensions" in caplog.text
    assert all(record.exc_info is None for record in caplog.records)


def test_without_a_reference_every_sample_fails(make: Make, heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    def load() -> Reference:
        raise ArtifactError("no residual")

    make(load).offer(*pair())
    until(lambda: heard.samples["failed"] == 1)
    assert "no live drift: the fp32 reference cannot be loaded: no residual" in caplog.text


def test_closing_ends_the_thread_and_frees_the_reference(make: Make, reference: Reference) -> None:
    shadow = make()
    shadow.offer(*pair())
    until(lambda: reference.running)
    assert shadow.close()
    assert reference.closed


def test_closing_waits_for_no_longer_than_its_deadline_and_says_so(make: Make, reference: Reference) -> None:
    loading = threading.Event()

    def load() -> Reference:
        loading.set()
        assert reference.gate.wait(20)
        return reference

    reference.gate.clear()
    shadow = make(load)
    assert loading.wait(20)
    begun = time.monotonic()
    assert not shadow.close(begun + 0.05)
    assert time.monotonic() - begun < 10
    reference.gate.set()
    assert shadow.close()
    assert reference.closed
