"""Live drift: samples of live requests are run again on the fp32 reference, and compared.

Each model has one thread, which has a low priority once it has loaded the reference. A sample that finds no room is
dropped, and its ``on_outcome`` is called with that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from bf16kit.messages.errors import Bf16kitError, Unavailable
from bf16kit.messages.wording import brief
from bf16kit.service.contract import Array
from bf16kit.service.drift.breachevidence import EvidenceRecorder
from bf16kit.service.drift.comparison import Comparison
from bf16kit.service.drift.contract import DriftVerdict
from bf16kit.service.drift.sampler import MAX_BYTES, QUEUE_SIZE, OnOutcome, Outcome, Sample, lower_priority
from bf16kit.service.telemetry.modelmetrics import ModelMetrics

_log = logging.getLogger(__name__)
LONGEST_RUN_S = 60.0  # of one reference run: a longer one delays other samples too much to be worth it


class Reference(Protocol):
    """The model in fp32: the part of :class:`bf16kit.runtime.Runtime` that the shadow needs.

    ``up``: whether it answers, which may change with each run. It logs such a change itself.
    """

    @property
    def up(self) -> bool: ...

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str], *, seconds: float) -> dict[str, Array]:
        """Raises Unavailable while it is not up, and RuntimeFailure if it fails on these inputs."""

    def close(self) -> None: ...


class Measuring(NamedTuple):
    """What measures a model's samples. ``recorder`` keeps evidence of breaches; None: nothing does."""

    reference: Reference
    comparison: Comparison
    recorder: EvidenceRecorder | None = None

    def restart(self) -> None:
        self.comparison.restart()
        if self.recorder is not None:
            self.recorder.restart()


class Shadow:
    """Measures one model's samples. :meth:`start`, before any sample, calls ``load`` in the background.

    ``on_measured`` is called with the verdict on the shadow's thread after each measured sample.
    """

    def __init__(
        self,
        load: Callable[[], Measuring],
        metrics: ModelMetrics,
        *,
        name: str,
        on_measured: Callable[[DriftVerdict], object] = lambda verdict: None,
    ) -> None:
        self._load = load
        self._metrics = metrics
        self._name = name
        self._on_measured = on_measured
        self._thread = ThreadPoolExecutor(1, f"{name}-shadow")
        self._lock = threading.Lock()  # of the three below
        self._samples = self._bytes_in_use = 0  # of the samples that wait or are measured
        self._stopped = False
        self._measuring: Measuring | None = None  # on the thread alone

    def start(self) -> None:
        self._thread.submit(self._open)

    def put(self, sample: Sample, on_outcome: OnOutcome) -> None:
        """Queue a sample. ``on_outcome`` is called with its outcome, on any thread: "dropped" if there is no room."""
        with self._lock:
            room = self._samples < QUEUE_SIZE and self._bytes_in_use + sample.nbytes <= MAX_BYTES
            if queued := room and not self._stopped:
                self._samples += 1
                self._bytes_in_use += sample.nbytes
                self._thread.submit(self._process, sample, on_outcome)
        if not queued:
            on_outcome("dropped")

    def restart(self) -> None:
        """Forget recent drift once the samples queued so far are measured: another precision answers from now on."""
        with self._lock:
            if not self._stopped:
                self._thread.submit(self._forget)

    def stop(self) -> None:
        """Measure no further sample, drop those that wait, and free the reference. Waits for nothing."""
        with self._lock:
            if not self._stopped:
                self._thread.submit(self._close)
            self._stopped = True
            self._thread.shutdown(wait=False)

    # --- the shadow's thread ------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if not self._stopped:
            self._measuring = self._load_reference()
        lower_priority()  # not before: a full machine would load for minutes, and niceness cannot be taken back

    def _forget(self) -> None:
        if self._measuring is not None:
            self._measuring.restart()

    def _close(self) -> None:
        if self._measuring is not None:
            self._measuring.reference.close()

    def _process(self, sample: Sample, on_outcome: OnOutcome) -> None:
        outcome: Outcome = "dropped" if self._stopped else self._measure(sample)
        with self._lock:
            self._samples -= 1
            self._bytes_in_use -= sample.nbytes
        on_outcome(outcome)

    def _load_reference(self) -> Measuring | None:
        start = time.monotonic()
        try:
            measuring = self._load()
        except Exception as error:  # noqa: BLE001 - the model serves without a reference too, and the error is logged
            reason = str(error) if isinstance(error, Bf16kitError) else repr(error)
            _log.error("%s: no live drift: the fp32 reference cannot be loaded: %s", self._name, reason)
            return None
        if measuring.reference.up:
            _log.info("%s: live drift on: fp32 reference loaded in %.1f s", self._name, time.monotonic() - start)
        self._metrics.reference_up(measuring.reference.up)
        return measuring

    def _measure(self, sample: Sample) -> Outcome:
        if self._measuring is None:
            return "failed"
        reference, comparison, recorder = self._measuring
        try:
            expected = reference.run(sample.feeds, tuple(sample.outputs), seconds=LONGEST_RUN_S)
            drifts = comparison.observe(expected, sample, self._metrics)
            if drifts is None:
                return "failed"  # counted apart as well: bf16kit_drift_reference_nonfinite_total
            if recorder is not None:
                recorder.record(expected, sample, drifts, comparison.verdict())
        except Unavailable:  # the reference logs this itself, once and not for each sample
            return "failed"
        except Exception as error:  # noqa: BLE001 - one sample that fails must not end the measuring
            bug = not isinstance(error, Bf16kitError)
            _log.error("%s: a shadow sample failed: %s", self._name, brief(error), exc_info=bug)
            return "failed"
        finally:
            self._metrics.reference_up(reference.up)
        self._metrics.last_sample(time.time())
        self._on_measured(comparison.verdict())
        return "measured"
