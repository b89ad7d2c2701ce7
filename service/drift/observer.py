"""Who is told of live drift: the metrics."""

from __future__ import annotations

from typing import Literal, Protocol

from bf16kit.drift import SampleDrift


class DriftObserver(Protocol):
    """Told the drift of every sample (row) of every output, and how recent drift compares to the budget."""

    def drift(self, output: str, sample: SampleDrift) -> None: ...
    def budget_ratio(self, output: str, metric: str, ratio: float) -> None: ...


class ShadowObserver(DriftObserver, Protocol):
    """Told what became of each sample (row), and its drift."""

    def sampled(self, outcome: Literal["measured", "dropped", "failed"], samples: int) -> None: ...
