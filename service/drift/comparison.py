"""Live answers against the fp32 reference's, and recent ones together against the budget."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from bf16kit.drift import Budget, DriftSummary, SampleDrift, measure
from bf16kit.errors import ArtifactError
from bf16kit.tensors import TensorSpec
from service.contract import Array
from service.drift.observer import DriftObserver

WINDOW = 256  # the newest samples of each output, which the budget ratio is taken over


class Comparison:
    """Live drift of one model: each sample as it comes, and the newest :data:`WINDOW` together. For one thread."""

    def __init__(self, outputs: Sequence[TensorSpec], batch_axis: int | None, budget: Budget) -> None:
        self._outputs = outputs
        self._batch_axis = batch_axis
        self._budget = budget
        self._recent: dict[str, deque[SampleDrift]] = {spec.name: deque(maxlen=WINDOW) for spec in outputs}

    def observe(self, expected: Mapping[str, Array], answered: Mapping[str, Array], observer: DriftObserver) -> None:
        """Compare one request's outputs; those that were not asked for are passed over.

        Raises ArtifactError for a reference that answers without rows.
        """
        for spec in self._outputs:
            if spec.name not in answered:
                continue
            samples = measure(expected[spec.name], answered[spec.name], spec, self._batch_axis)
            if not samples:
                raise ArtifactError(f"the fp32 reference's output {spec.name!r} has no rows")
            for sample in samples:
                observer.drift(spec.name, sample, 1.0)
            recent = self._recent[spec.name]
            recent.extend(samples)
            self._tell_ratios(spec.name, DriftSummary.of(recent), observer)

    def restart(self) -> None:
        """Forget recent drift."""
        for recent in self._recent.values():
            recent.clear()

    def _tell_ratios(self, output: str, summary: DriftSummary, observer: DriftObserver) -> None:
        for metric in self._budget.as_dict():
            measured = summary.judged(metric)
            if measured is not None:
                observer.budget_ratio(output, metric, self._budget.ratio(metric, measured), 0.0, math.inf)
