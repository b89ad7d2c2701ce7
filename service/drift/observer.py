"""Who is told of live drift: the metrics."""

from __future__ import annotations

from typing import Literal, Protocol

from bf16kit.drift import SampleDrift

Outcome = Literal["measured", "dropped", "failed"]


class DriftObserver(Protocol):
    """Told the drift of every sample (row) of every output, and what recent samples say together."""

    def drift(self, output: str, sample: SampleDrift, weight: float) -> None:
        """One row's drift, which speaks for ``weight`` rows that were answered."""

    def budget_ratio(self, output: str, metric: str, ratio: float, low: float, high: float) -> None:
        """Recent drift ÷ budget of one bound, and its 95 % interval."""

    def recent(self, output: str, effective_samples: float, change_score: float | None) -> None:
        """How many samples of one weight recent drift is worth; the detector's sum ÷ threshold, None before it is
        calibrated."""

    def changed(self, output: str) -> None:
        """The detector gives the alarm."""

    def out_of_range(self, name: str, rows: int) -> None:
        """So many of the measured rows of an input lie outside its calibrated range; 0: it has one."""

    def judged(self, over: bool, cause: str) -> None:
        """Whether recent drift is over budget with confidence, and what ails the model."""


class OutcomeObserver(Protocol):
    """Told what became of each sample (row)."""

    def sampled(self, outcome: Outcome, samples: int) -> None: ...


class ReferenceObserver(DriftObserver, Protocol):
    """Told the drift of samples, when the last was measured, and whether the reference answers."""

    def reference_up(self, up: bool) -> None: ...
    def last_sample(self, at: float) -> None: ...
