"""The figures of an artifact that people ask for: sizes, drift against budget, what is bf16 and what is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bf16kit.drift import METRICS, Budget, DriftSummary
from bf16kit.manifest import RESIDUAL, FileEntry, Manifest, PlanEntry

WITHOUT_RESIDUAL = ("weights.bf16", "weights.fp32")


@dataclass(frozen=True, slots=True)
class DriftRow:
    """One metric of one output in one profile. ``bound`` is None where the budget has none."""

    profile: str
    output: str
    metric: str
    measured: float
    worst: float | None
    bound: float | None
    within: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes: of the source's tensors, of weights and graphs, and of the residual."""

    checkpoint: int
    graphs_and_weights: int
    residual: int

    @property
    def ratio(self) -> float:
        """Weights and graphs ÷ checkpoint."""
        return self.graphs_and_weights / max(1, self.checkpoint)

    @property
    def ratio_with_residual(self) -> float:
        return (self.graphs_and_weights + self.residual) / max(1, self.checkpoint)


def sizes(manifest: Manifest, files: Mapping[str, FileEntry]) -> Sizes:
    """Sizes of the ONNX side of an artifact; the TorchScript module, another format of the same model, is not in it."""
    counted = [name for name in files if name in WITHOUT_RESIDUAL or name.endswith(".onnx")]
    residual = files[RESIDUAL].bytes if RESIDUAL in files else 0
    return Sizes(manifest.source.bytes, sum(files[name].bytes for name in counted), residual)


def drift_rows(manifest: Manifest) -> Iterator[DriftRow]:
    """Every metric measured at conversion, in the order of profiles, outputs and metrics."""
    budget = Budget.from_dict(manifest.budget)
    for profile, entry in sorted(manifest.drift.items()):
        for output, metrics in sorted(entry.outputs.items()):
            summary = DriftSummary(entry.samples, metrics)
            over = {breach.metric for breach in budget.breaches(output, summary)}
            for name in (*METRICS, *(name for name in budget.as_dict() if name not in METRICS)):
                judged = summary.judged(name)
                if judged is not None:
                    bound, worst = budget.bound(name), summary.worst(name)
                    yield DriftRow(profile, output, name, judged, worst, bound, name not in over)


def reasons(entries: list[PlanEntry]) -> list[tuple[str, str, int]]:
    """How many entries of a plan have which precision for which reason, the most frequent first."""
    counts = Counter((entry.precision, entry.reason) for entry in entries)
    return [(precision, reason, count) for (precision, reason), count in counts.most_common()]
