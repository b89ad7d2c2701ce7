"""What a recovery measured: kept in ``measurements.json`` of an artifact whose weights were trained for bf16."""

from __future__ import annotations

from pydantic import BaseModel, model_validator

from bf16kit.entries import STRICT, Size
from bf16kit.measured import Number


class _Entry(BaseModel):
    model_config = STRICT


class GradientEntry(_Entry):
    """What becomes of the gradients of one step, computed in fp32, when ``format`` is to hold them times ``scale``.

    ``values`` counts those that are not zero, ``of`` all trained weights or all ``activations`` between layers. Of them
    ``vanished`` become zero, ``subnormal`` keep fewer bits than the format has, ``overflowed`` become infinite.
    """

    step: Size
    of: str
    format: str
    scale: Number
    values: Size
    vanished: Size
    subnormal: Size
    overflowed: Size

    @model_validator(mode="after")
    def _parts(self) -> GradientEntry:
        if self.vanished + self.subnormal + self.overflowed > self.values:
            raise ValueError("more gradients are lost than there are")
        return self


class LookEntry(_Entry):
    """The loss after ``step`` on the batches that the best weights are chosen by."""

    step: Size
    loss: Number


class TrainingEntry(_Entry):
    """How the weights were trained.

    ``steps`` were made, of which ``skipped`` changed nothing because a gradient was not finite. ``computed`` is the
    dtype that products were seen to give, whatever was asked for. Losses are those of the first and the last step's
    batch. ``updates_lost``: where weights have no fp32 copy, the share of those with a
    gradient that a step left exactly as they were; else None.

    The best weights were chosen on ``yardstick`` batches of the training data, by their loss at ``looks``: those after
    step ``kept``, where 0 is before any step. ``loss_before`` is that of the weights as they were, from which
    ``biases_corrected`` biases differ at step 0. ``rate_share`` is what became of the learning rate: it halves
    whenever a look finds nothing better. Artifacts of earlier versions have none of these.
    """

    steps: Size
    skipped: Size
    precision: str
    computed: str
    device: str
    loss: str
    loss_first: Number
    loss_last: Number
    learning_rate: Number
    scaling: str
    scale_first: Number
    scale_last: Number
    weights: Size
    updates_lost: Number | None = None
    biases_corrected: Size = 0
    yardstick: Size = 0
    loss_before: Number | None = None
    looks: list[LookEntry] = []
    kept: Size | None = None
    rate_share: Number = 1.0


class RecoveredDrift(_Entry):
    """One metric of one output in one profile, as the budget judges it, and the ``bound`` it has (None: none).

    ``before``: of the bf16 artifact of the weights as they were, from their fp32 answers; None where that has no such
    profile. ``after``: of the recovered bf16 artifact from the *same* answers. ``own``: of that artifact from the fp32
    answers of the recovered weights.
    """

    profile: str
    output: str
    metric: str
    before: Number | None
    after: Number
    own: Number
    bound: Number | None = None


class AccuracyEntry(_Entry):
    """How many of ``rows`` labelled rows one model answers with the label."""

    model: str
    correct: Size
    rows: Size

    @property
    def share(self) -> float:
        return self.correct / max(1, self.rows)


class RecoveryEntry(_Entry):
    """A recovery: ``recovered_from`` is the sha256 of the source it began with, ``judged_on`` says what answered."""

    recovered_from: str
    judged_on: str
    samples: Size
    held_out: bool
    training: TrainingEntry
    gradients: list[GradientEntry] = []
    drift: list[RecoveredDrift] = []
    accuracy: list[AccuracyEntry] = []
