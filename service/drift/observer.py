"""The observers of live drift: protocols that the metrics implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from bf16kit.drift.metrics import SampleDrift

Outcome = Literal["measured", "dropped", "failed"]


class DriftObserver(Protocol):
    """Receives the drift of every sample (row) of every output, and the summary of recent samples."""

    def drift(self, output: str, sample: SampleDrift, weight: float, *, scalar: bool = False) -> None:
        """One row's drift, which stands for ``weight`` answered rows. ``scalar``: the row is one number."""

    def judged_rows(self, output: str, rows: Sequence[SampleDrift], weight: float) -> None:
        """All rows of one request, if its drift counts in the verdict; each stands for ``weight`` answered rows."""

    def budget_ratio(self, output: str, metric: str, ratio: float, low: float, high: float) -> None:
        """Recent drift ÷ budget of one bound, and its 95 % interval."""

    def worst_slice(self, output: str, axis: int, index: int) -> None:
        """The axis and the index of the slice with the largest error, if slices have a bound."""

    def recent(self, output: str, effective_samples: float, change_score: float | None) -> None:
        """The effective sample size of recent drift, and the detector's sum ÷ threshold (None: not calibrated yet)."""

    def changed(self, output: str) -> None:
        """The change detector has given the alarm."""

    def out_of_range(self, name: str, rows: int) -> None:
        """``rows`` measured rows of an input lie outside its calibrated range.

        Called with 0 too, for an input with a range.
        """

    def reference_nonfinite(self, rows: int) -> None:
        """``rows`` are left out of all drift, because an output of the reference is not finite for their request."""

    def judged(self, state: str, cause: str) -> None:
        """The state of recent drift and the diagnosed cause; see :class:`service.drift.verdict.DriftVerdict`."""


class OutcomeObserver(Protocol):
    """Receives the outcome of each sample (row)."""

    def sampled(self, outcome: Outcome, samples: int) -> None: ...


class ReferenceObserver(DriftObserver, Protocol):
    """Also receives when the last sample was measured, and whether the reference answers."""

    def reference_up(self, up: bool) -> None: ...
    def last_sample(self, at: float) -> None: ...
