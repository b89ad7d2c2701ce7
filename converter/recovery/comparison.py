"""Judges a recovery: compares the recovered bf16 artifact and the original one with the original's fp32 outputs.

The user wants bf16 outputs as good as the fp32 ones were. So the measure is the outputs of the *original* weights in
fp32. The artifact's own drift budget, measured from the recovered weights in fp32, only shows what rounding still
costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.recoveryentries import AccuracyEntry, RecoveredDrift
from bf16kit.drift.budget import Budget
from bf16kit.drift.metrics import DriftSummary
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Runtime
from bf16kit.runtime.loading import load_reference
from converter.process.memory import release_memory
from converter.recovery.batches import IGNORED, Batch, check_labels
from converter.recovery.loss import logits_of
from converter.source import Feeds
from converter.verify import measure
from converter.verify.measure import Drifts, SliceScales
from converter.verify.running import open_profile
from converter.verify.spool import Spool

REFERENCE = "fp32"
RECOVERED = "recovered fp32"


@dataclass
class Comparison:
    """The rows of a comparison and, by profile, sentences on where the recovered artifact is over the budget."""

    drift: list[RecoveredDrift] = field(default_factory=list)
    accuracy: list[AccuracyEntry] = field(default_factory=list)
    breaches: dict[str, list[str]] = field(default_factory=dict)

    def accuracy_of(self, model: str) -> AccuracyEntry | None:
        """Return the accuracy counted for ``model``, or None without labels."""
        return next((entry for entry in self.accuracy if entry.model == model), None)

    def made_worse(self, *, by_labels: bool) -> str | None:
        """Return a sentence if the recovered bf16 outputs are farther from fp32's than before, else None.

        With ``by_labels``, compare instead how many labelled rows are right. Only the worst of all profiles and outputs
        counts before and after, so one may lose if the worst one gains.
        """
        if by_labels:
            pairs = [
                (self.accuracy_of(bf16_before(name)), self.accuracy_of(bf16_after(name))) for name in self.breaches
            ]
            counted = [(was.share, now.share) for was, now in pairs if was is not None and now is not None]
            was, now = (min((pair[side] for pair in counted), default=0.0) for side in (0, 1))
            return f"{now:.4f} of the labelled rows are right, {was:.4f} before" if now < was else None
        rows = [(row.before, row.after) for row in self.drift if row.metric == "relative_l2" and row.before is not None]
        was, now = (max((pair[side] for pair in rows), default=0.0) for side in (0, 1))
        return f"relative_l2 {now:.3g}, {was:.3g} before" if now > was else None


def bf16_before(profile: str) -> str:
    """Return the name for the accuracy of the original weights in ``profile``."""
    return f"{profile}, as it was"


def bf16_after(profile: str) -> str:
    """Return the name for the accuracy of the recovered weights in ``profile``."""
    return f"{profile}, recovered"


def compare(before: Artifact, after: Artifact, batches: Sequence[Batch], budget: Budget, scratch: Path) -> Comparison:
    """Run both artifacts and both their fp32 references on ``batches``; outputs are kept in files in ``scratch``.

    Raises :class:`UsageError` if labels do not match the logits.
    """
    found = Comparison()
    outputs = [entry.spec() for entry in after.manifest.outputs]
    counter = _AccuracyCounter(outputs, batches)
    axis = before.manifest.batch_axis
    feeds = [batch.feeds for batch in batches]
    original = _run_reference(load_reference(before), REFERENCE, feeds, counter, scratch)
    recovered = _run_reference(load_reference(after), RECOVERED, feeds, counter, scratch)
    against = [(kept, measure.slice_scales(kept, outputs, axis)) for kept in (original, recovered)]
    for profile in sorted(after.manifest.profiles):
        was: Mapping[str, DriftSummary] = {}
        if profile in before.manifest.profiles:
            runtime, _ = open_profile(before, profile)
            (was,) = _measure_drift(runtime, bf16_before(profile), feeds, against[:1], outputs, axis, counter)
        runtime, _ = open_profile(after, profile)
        now, from_recovered = _measure_drift(runtime, bf16_after(profile), feeds, against, outputs, axis, counter)
        for output in sorted(now):
            found.drift += _rows(profile, output, budget, was.get(output), now[output], from_recovered[output])
        found.breaches[profile] = [
            f"profile {profile}, {breach}" for output in sorted(now) for breach in budget.breaches(output, now[output])
        ]
    original.close()
    recovered.close()
    found.accuracy = counter.entries
    return found


def accuracy_breaches(found: Comparison, budget: Budget) -> dict[str, list[str]]:
    """Return, by profile, sentences on where a recovered artifact has fewer rows right than fp32 had.

    The share may be lower by as much as the budget lets top-1 differ.
    """
    reference, bound = found.accuracy_of(REFERENCE), budget.bound("top1_agreement")
    breaches: dict[str, list[str]] = {profile: [] for profile in found.breaches}
    if reference is None or bound is None:
        return breaches
    for profile, lines in breaches.items():
        now = found.accuracy_of(bf16_after(profile))
        if now is not None and now.share < reference.share - (1 - bound):
            lines.append(
                f"profile {profile}: accuracy {now.share:.4f} on {now.rows} labelled rows, fp32 had"
                f" {reference.share:.4f}, and the budget allows {1 - bound:.3g} less (top1_agreement={bound:g})"
            )
    return breaches


class _AccuracyCounter:
    """Counts the labelled rows that each model gets right."""

    def __init__(self, outputs: Sequence[TensorSpec], batches: Sequence[Batch]) -> None:
        self.logits = logits_of(outputs)
        self.batches = batches
        self.entries: list[AccuracyEntry] = []
        self._correct = self._rows = 0

    def count(self, index: int, outputs: Feeds) -> None:
        labels = self.batches[index].labels
        if self.logits is None or labels is None:
            return
        logits = outputs[self.logits]
        check_labels(self.batches[index], self.logits, logits.shape)
        counts = labels != IGNORED
        self._correct += int(np.count_nonzero((logits.argmax(-1) == labels) & counts))
        self._rows += int(np.count_nonzero(counts))

    def finish(self, model: str) -> None:
        if self._rows:
            self.entries.append(AccuracyEntry(model=model, correct=self._correct, rows=self._rows))
        self._correct = self._rows = 0


def _run_reference(
    runtime: Runtime, model: str, feeds: Sequence[Feeds], counter: _AccuracyCounter, scratch: Path
) -> Spool:
    kept = Spool(scratch)
    for index, outputs in enumerate(measure.run_all(runtime, feeds)):
        counter.count(index, outputs)
        kept.append(outputs)
    counter.finish(model)
    runtime.close()
    release_memory()
    return kept


def _measure_drift(
    runtime: Runtime,
    model: str,
    feeds: Sequence[Feeds],
    references: Sequence[tuple[Sequence[Feeds], SliceScales]],
    outputs: Sequence[TensorSpec],
    axis: int | None,
    counter: _AccuracyCounter,
) -> list[dict[str, DriftSummary]]:
    """Return the drift of ``runtime`` from each of ``references``, given with its slices' scales, by output.

    Every feed is run once.
    """
    found: list[list[Drifts]] = [[] for _ in references]
    for index, actual in enumerate(measure.run_all(runtime, feeds)):
        counter.count(index, actual)
        for (reference, scales), drifts in zip(references, found, strict=True):
            drifts += measure.drifts([reference[index]], [actual], outputs, axis, scales)
    counter.finish(model)
    runtime.close()
    release_memory()
    return [measure.summarise(drifts) for drifts in found]


def _rows(
    profile: str, output: str, budget: Budget, was: DriftSummary | None, now: DriftSummary, from_recovered: DriftSummary
) -> list[RecoveredDrift]:
    rows = []
    for metric in dict.fromkeys(["relative_l2", *budget.as_dict()]):
        after, own = now.judged(metric), from_recovered.judged(metric)
        if after is None or own is None:
            continue
        rows.append(
            RecoveredDrift(
                profile=profile,
                output=output,
                metric=metric,
                before=None if was is None else was.judged(metric),
                after=after,
                own=own,
                bound=budget.bound(metric),
            )
        )
    return rows
