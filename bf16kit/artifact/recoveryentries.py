"""The measurements of a recovery, kept in ``measurements.json`` of an artifact whose weights were trained for bf16."""

from __future__ import annotations

from pydantic import BaseModel

from bf16kit.artifact.entries import STRICT, Number, Size


class _Entry(BaseModel):
    model_config = STRICT


class GradientEntry(_Entry):
    """Losses of one step's fp32 gradients when they are multiplied by ``scale`` and stored in ``format``.

    ``values`` counts the nonzero ones; ``of`` says of what: of all trained weights, or of all ``activations`` between
    layers. Of these, ``vanished`` become zero, ``subnormal`` keep fewer bits than the format has, and ``overflowed``
    become infinite.
    """

    step: Size
    of: str
    format: str
    scale: Number
    values: Size
    vanished: Size
    subnormal: Size
    overflowed: Size


class LookEntry(_Entry):
    """The loss after ``step`` on the batches that are used to choose the best weights."""

    step: Size
    loss: Number


class TrainingEntry(_Entry):
    """How the weights were trained.

    Of ``steps`` training steps, ``skipped`` changed nothing because a gradient was not finite. ``computed`` is the
    dtype that products were observed to have, whatever ``precision`` was asked for. ``loss_first`` and ``loss_last``
    are those of the first and the last step's batch. ``updates_lost`` is the share of the weights with a gradient that
    a step left unchanged; None if weights have an fp32 copy.

    The best weights were chosen by their loss on ``yardstick`` batches of the training data at ``looks``. They are
    those after step ``kept``; step 0 is before training. ``loss_before`` is the loss of the original weights, from
    which ``biases_corrected`` biases differ at step 0. ``rate_share`` is the last learning rate as a share of the
    first: it halves whenever a look finds nothing better. Artifacts of earlier versions have none of these.
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
    """One metric of one output in one profile, as the budget judges it, and its ``bound`` (None: unbounded).

    ``before``: drift of the bf16 artifact with the original weights from their fp32 outputs; None if it lacks the
    profile. ``after``: drift of the recovered bf16 artifact from the *same* outputs. ``own``: drift of that artifact
    from the fp32 outputs of the recovered weights.
    """

    profile: str
    output: str
    metric: str
    before: Number | None
    after: Number
    own: Number
    bound: Number | None = None


class AccuracyEntry(_Entry):
    """How many of ``rows`` labelled rows one model classifies correctly."""

    model: str
    correct: Size
    rows: Size

    @property
    def share(self) -> float:
        return self.correct / max(1, self.rows)


class RecoveryEntry(_Entry):
    """A recovery: ``recovered_from`` is the sha256 of its source, ``judged_on`` the origin of the judged samples."""

    recovered_from: str
    judged_on: str
    samples: Size
    held_out: bool
    training: TrainingEntry
    gradients: list[GradientEntry] = []
    drift: list[RecoveredDrift] = []
    accuracy: list[AccuracyEntry] = []
