"""The measurements of a recovery, as tables for the user."""

from __future__ import annotations

from bf16kit.artifact.recoveryentries import GradientEntry, RecoveredDrift, RecoveryEntry, TrainingEntry
from bf16kit.messages.wording import table

DRIFT = ("profile", "output", "metric", "bf16 before", "bf16 recovered", "from its own fp32", "budget")
GRADIENTS = ("at step", "of", "format", "loss ×", "values", "vanish", "subnormal", "overflow")
ACCURACY = ("model", "right", "of", "accuracy")


def text(entry: RecoveryEntry) -> str:
    """Return every table, and how the weights were trained."""
    count = f"{entry.samples} batch{'' if entry.samples == 1 else 'es'} of {entry.judged_on}"
    parts = [
        table(f"Drift from the fp32 outputs of the original weights on {count}", DRIFT, map(drift_cells, entry.drift)),
        table("Labelled rows with the right answer", ACCURACY, accuracy_rows(entry)) if entry.accuracy else "",
        table(
            "Gradients computed in fp32, and what each format loses of them",
            GRADIENTS,
            map(gradient_cells, entry.gradients),
        ),
        "\n".join(sentences(entry.training)),
    ]
    return "\n\n".join(part for part in parts if part)


def drift_cells(row: RecoveredDrift) -> tuple[object, ...]:
    """Return one row of the columns :data:`DRIFT`."""
    return row.profile, row.output, row.metric, row.before, row.after, row.own, row.bound


def accuracy_rows(entry: RecoveryEntry) -> list[tuple[object, ...]]:
    """Return the rows of the columns :data:`ACCURACY`."""
    return [(found.model, found.correct, found.rows, f"{found.share:.4f}") for found in entry.accuracy]


def gradient_cells(entry: GradientEntry) -> tuple[object, ...]:
    """Return one row of the columns :data:`GRADIENTS`; losses are shares of the values that are not zero."""
    lost = (entry.vanished, entry.subnormal, entry.overflowed)
    values = max(1, entry.values)
    return (
        entry.step,
        entry.of,
        entry.format,
        f"{entry.scale:g}",
        f"{entry.values:,}",
        *(_percent(count / values) for count in lost),
    )


def sentences(training: TrainingEntry) -> list[str]:
    """Describe how the weights were trained, one sentence each."""
    found = [
        f"{training.steps} steps on the {training.device}, {training.precision} (products in {training.computed}),"
        f" {training.weights:,} weights, {training.loss}: {training.loss_first:.3g} at the first step,"
        f" {training.loss_last:.3g} at the last",
        f"loss scaling {training.scaling}: {training.skipped} of {training.steps} steps skipped"
        + (
            f", the scale went from {training.scale_first:g} to {training.scale_last:g}"
            if training.scale_first > 1
            else ""
        ),
    ]
    found += _describe_kept(training)
    if training.updates_lost is not None:
        found.append(f"weights without an fp32 copy: {_percent(training.updates_lost)} of updates were rounded away")
    return found


def _describe_kept(training: TrainingEntry) -> list[str]:
    """Describe which weights were kept; empty for artifacts of an earlier version, which published the last ones."""
    if training.kept is None or training.loss_before is None:
        return []
    batches = f"{training.yardstick} batch{'' if training.yardstick == 1 else 'es'} of --data"
    losses = {look.step: look.loss for look in training.looks}
    found = [f"loss before training, on {batches} by which the best weights are chosen: {training.loss_before:.3g}"]
    if training.biases_corrected:
        found.append(
            f"loss after {training.biases_corrected} biases were corrected for the average rounding error:"
            f" {losses[0]:.3g}"
        )
    if training.kept:
        found.append(f"kept: the weights after step {training.kept}, with a loss of {losses[training.kept]:.3g}")
    else:
        found.append("kept: the weights before the first step, because no later weights had a lower loss")
    if training.rate_share < 1:
        found.append(
            "whenever the loss had not improved, training returned to the best weights and halved the learning rate:"
            f" at the end {training.rate_share:.3g} of --learning-rate"
        )
    return found


def _percent(share: float) -> str:
    return "< 0.01 %" if 0 < share < 1e-4 else f"{share:.2%}"
