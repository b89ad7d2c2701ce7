"""One output's series of live drift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bf16kit.drift.metrics import SampleDrift
from bf16kit.numerics.tensors import TensorSpec
from service.telemetry import pooling, vocabulary

if TYPE_CHECKING:
    from service.telemetry.families import Families


class OutputSeries:
    """The series of one output of one generation. ``labels`` are its model and version."""

    def __init__(self, families: Families, labels: tuple[str, str], spec: TensorSpec) -> None:
        f, of = families, (*labels, spec.name)
        self._relative_l2, self._cosine = f.relative_l2.labels(*of), f.cosine.labels(*of)
        self._max_abs, self._nonfinite = f.max_abs.labels(*of), f.nonfinite.labels(*of)
        self._pooled = {
            metric: [f.pooled.labels(*of, metric, moment) for moment in pooling.MOMENTS] for metric in pooling.METRICS
        }
        self._top1 = (f.top1_matches.labels(*of), f.top1_rows.labels(*of)) if spec.kind == "logits" else None
        f.effective_samples.labels(*of)
        f.changes.labels(*of)

    def observe(self, sample: SampleDrift, weight: float, *, scalar: bool) -> None:
        """See :meth:`service.telemetry.modelmetrics.ModelMetrics.drift`."""
        if not scalar:
            self._relative_l2.observe(vocabulary.finite(sample.relative_l2), weight)
            self._cosine.observe(vocabulary.finite(sample.cosine_distance), weight)
        self._max_abs.observe(vocabulary.finite(sample.max_abs), weight)
        self._nonfinite.inc(sample.nonfinite)
        if self._top1 is not None:
            matches, rows = self._top1
            matches.inc(sample.top1_matches * weight)
            rows.inc(sample.top1_rows * weight)

    def add_judged(self, rows: Sequence[SampleDrift], weight: float) -> None:
        """Add one request's rows to the sums that are pooled over replicas."""
        for metric, sums in self._pooled.items():
            moments = pooling.moments([getattr(row, metric) for row in rows], weight)
            for series, value in zip(sums, moments, strict=True):
                series.inc(value)
