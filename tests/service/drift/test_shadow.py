import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pytest
from driftmetrics import DriftMetrics
from waiting import until

from bf16kit.drift.metrics import Budget
from bf16kit.messages.errors import ArtifactError, RuntimeFailure, Unavailable
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Array
from bf16kit.service.drift.breachevidence import EvidenceRecorder
from bf16kit.service.drift.comparison import Comparison, Drifts
from bf16kit.service.drift.contract import DriftVerdict
from bf16kit.service.drift.sampler import MAX_BYTES, NICENESS, QUEUE_SIZE, Sample
from bf16kit.service.drift.shadow import Measuring, Shadow

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


class Recorder(EvidenceRecorder):
    """Records what it is told: the drift of a sample's row, or a restart."""

    def __init__(self) -> None:
        super().__init__(0, Budget(), {})
        self.told: list[float | str] = []

    def restart(self) -> None:
        self.told.append("restart")

    def record(self, expected: object, sample: Sample, drifts: Drifts, verdict: DriftVerdict) -> None:
        self.told.append(round(drifts["y"][0].relative_l2, 4))


class Rig(DriftMetrics):
    """A shadow, its reference and metrics, and the outcomes of the samples that it was given, by rows."""

    def __init__(self) -> None:
        super().__init__(*SPECS)
        self.reference = Reference()
        self.recorder = Recorder()
        self.outcomes: Counter[str] = Counter()
        self.told: list[float | None] = []
        self.load: Callable[[], Reference] = lambda: self.reference
        self.shadow = Shadow(
            lambda: Measuring(self.load(), Comparison(SPECS, 0, Budget()), self.recorder),
            self.model,
            name="m",
            on_measured=lambda verdict: self.told.append(self.value("last_sample_timestamp_seconds")),
        )

    def put(self, rows: int = 1, error: float = 0.0, nbytes: int = 16, name: str = "x") -> None:
        x = np.ones((rows, 2), np.float32)
        sample = Sample({name: x}, {"y": x * np.float32(1 + error)}, rows, nbytes)
        self.shadow.put(sample, lambda outcome: self.outcomes.update({outcome: rows}))

    def hold(self) -> None:
        """Hold the reference's run of a first sample."""
        self.reference.gate.clear()
        self.shadow.start()
        self.put(error=0.03)
        until(lambda: self.reference.running)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.reference.gate.set()
    rig.shadow.stop()


def test_a_live_response_is_compared_with_the_reference_row_by_row(rig: Rig) -> None:
    """The time of the measurement is set before others are told of it."""
    begun = time.time()
    rig.shadow.start()
    rig.put(rows=3, error=0.03)
    until(lambda: rig.outcomes["measured"] == 3)
    assert rig.rows() == 3
    assert rig.ratio("relative_l2")[0] == pytest.approx(2.0, rel=1e-3)
    assert (rig.ratio("nonfinite")[0], rig.value("reference_up")) == (0, 1)
    assert begun <= (rig.told[0] or 0) <= time.time()


def test_the_reference_is_loaded_as_others_are_and_runs_with_low_priority(rig: Rig) -> None:
    """A full machine leaves a thread of low priority too little to load a model, and niceness cannot be taken back."""
    before, loading = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), list[int]()

    def load() -> Reference:
        loading.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return rig.reference

    rig.load = load
    rig.shadow.start()
    rig.put()
    until(lambda: rig.outcomes["measured"])
    assert loading == [before]
    assert rig.reference.nice == max(NICENESS, before)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_a_full_queue_drops_and_counts_and_never_blocks(rig: Rig) -> None:
    rig.hold()
    for _ in range(QUEUE_SIZE + 2):
        rig.put()
    assert rig.outcomes == {"dropped": 3}
    rig.reference.gate.set()
    until(lambda: rig.outcomes["measured"] == QUEUE_SIZE)
    rig.put()
    until(lambda: rig.outcomes == {"dropped": 3, "measured": QUEUE_SIZE + 1})


def test_samples_that_wait_are_bounded_by_their_bytes(rig: Rig) -> None:
    rig.reference.gate.clear()
    rig.shadow.start()
    for _ in range(4):
        rig.put(nbytes=MAX_BYTES // 3)
    assert rig.outcomes == {"dropped": 1}
    rig.reference.gate.set()
    until(lambda: rig.outcomes["measured"] == 3)
    rig.put(nbytes=MAX_BYTES + 1)  # alone, and still too large
    rig.put(nbytes=MAX_BYTES)
    until(lambda: rig.outcomes == {"measured": 4, "dropped": 2})


def test_samples_that_wait_when_the_shadow_is_stopped_are_dropped(rig: Rig) -> None:
    rig.hold()
    rig.put(rows=2)
    rig.shadow.stop()
    rig.put()
    assert rig.outcomes == {"dropped": 1}
    rig.reference.gate.set()
    until(lambda: rig.outcomes == {"dropped": 3, "measured": 1})
    until(lambda: rig.reference.closed)


def test_a_restart_takes_effect_after_the_samples_that_were_put_before_it(rig: Rig) -> None:
    rig.hold()
    rig.put(error=0.03)
    rig.shadow.restart()
    rig.put(error=0.015)
    rig.reference.gate.set()
    until(lambda: rig.outcomes["measured"] == 3)
    assert rig.ratio("relative_l2")[0] == pytest.approx(1.0, rel=1e-3)
    assert rig.recorder.told == [0.03, 0.03, "restart", 0.015]


def test_samples_that_fail_are_counted_and_the_next_is_measured(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """An error of the reference is logged without a traceback, a bug with one, and nothing while it is away."""
    rig.shadow.start()
    rig.reference.error = Unavailable("the fp32 reference was unloaded")
    rig.put()
    until(lambda: rig.outcomes["failed"] == 1)
    assert rig.value("reference_up") == 0
    assert "failed" not in caplog.text
    rig.reference.up, rig.reference.error = True, RuntimeFailure("ONNX Runtime failed: dimensions")
    rig.put()
    until(lambda: rig.outcomes["failed"] == 2)
    rig.reference.error = None
    rig.put(name="wrong")
    rig.put()
    until(lambda: rig.outcomes == {"failed": 3, "measured": 1})
    assert rig.value("reference_up") == 1
    assert "a shadow sample failed: ONNX Runtime failed: dimensions" in caplog.text
    assert [bool(record.exc_info) for record in caplog.records if "failed" in record.getMessage()] == [False, True]


def test_without_a_reference_every_sample_fails(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def load() -> Reference:
        raise ArtifactError("no residual")

    rig.load = load
    rig.shadow.start()
    rig.put()
    until(lambda: rig.outcomes["failed"] == 1)
    assert "no live drift: the fp32 reference cannot be loaded: no residual" in caplog.text
    assert rig.value("reference_up") is None


def test_a_shadow_that_is_stopped_while_it_loads_frees_the_reference(rig: Rig) -> None:
    loading = threading.Event()

    def load() -> Reference:
        loading.set()
        assert rig.reference.gate.wait(20)
        return rig.reference

    rig.load = load
    rig.reference.gate.clear()
    rig.shadow.start()
    assert loading.wait(20)
    begun = time.monotonic()
    rig.shadow.stop()
    assert time.monotonic() - begun < 10, "it waits for nothing"
    rig.reference.gate.set()
    until(lambda: rig.reference.closed)
