"""The measurements of a recovery, as a table and sentences for the user."""

from __future__ import annotations

from collections.abc import Iterator

from bf16kit.artifact.recoveryentries import RecoveredDrift, RecoveryEntry, TrainingEntry
from bf16kit.messages.wording import table

DRIFT = ("profile", "output", "metric", "bf16 before", "bf16 recovered", "from its own fp32", "budget")


def text(entry: RecoveryEntry) -> str:
    """Return the drift, and how the weights were trained."""
    title = f"Drift from the fp32 outputs of the original weights on {entry.samples} batches of {entry.judged_on}"
    return "\n".join([table(title, DRIFT, map(drift_cells, entry.drift)), "", *sentences(entry.training)])


def drift_cells(row: RecoveredDrift) -> tuple[object, ...]:
    """Return one row of the columns :data:`DRIFT`."""
    return row.profile, row.output, row.metric, row.before, row.after, row.own, row.bound


def sentences(training: TrainingEntry) -> Iterator[str]:
    """Describe how the weights were trained, one sentence each."""
    yield (
        f"{training.steps} steps on the {training.device}, {training.precision} (products in {training.computed}),"
        f" {training.weights:,} weights; {training.loss} loss {training.loss_first:.3g} at the first step,"
        f" {training.loss_last:.3g} at the last; loss scaling {training.scaling}: {training.skipped} steps skipped,"
        f" scale {training.scale_first:g} at first, {training.scale_last:g} at last"
    )
    if training.kept is not None and training.loss_before is not None:  # the oldest artifacts have neither
        losses = {look.step: look.loss for look in training.looks}
        yield (
            f"loss on {training.yardstick} batches of --data: {training.loss_before:.3g} before training,"
            f" {losses[0]:.3g} after {training.biases_corrected} vectors in fp32 were fitted to the rounded weights,"
            f" {losses[training.kept]:.3g} after step {training.kept}, whose weights were kept"
        )
