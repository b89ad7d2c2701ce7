"""The measurements of a recovery, kept in ``measurements.json`` of an artifact whose weights were trained for bf16."""

from __future__ import annotations

import math

from pydantic import ConfigDict

from bf16kit.artifact.entries import Entry, Number, Size


class _Entry(Entry):
    model_config = ConfigDict(extra="ignore")  # earlier versions recorded more


class LookEntry(_Entry):
    """The loss after ``step`` on the batches that are used to choose the best weights."""

    step: Size
    loss: Number


class TrainingEntry(_Entry):
    """How the weights were trained; ``skipped`` steps changed nothing because a gradient was not finite.

    The weights after step ``kept`` had the least loss on ``yardstick`` batches of the training data, at ``looks``; step
    0 is before training. ``loss_before`` is that of the original weights, from which ``biases_corrected`` vectors
    differ at step 0. ``rate_share`` is the last learning rate as a share of the first. The oldest artifacts lack these.
    """

    steps: Size
    skipped: Size = 0
    precision: str
    computed: str
    device: str
    loss: str = "distillation"
    loss_first: Number = math.nan
    loss_last: Number = math.nan
    learning_rate: Number
    scaling: str
    scale_first: Number
    scale_last: Number = 1.0
    weights: Size
    biases_corrected: Size = 0
    yardstick: Size = 0
    loss_before: Number | None = None
    looks: list[LookEntry] = []
    kept: Size | None = None
    rate_share: Number = 1.0


class RecoveredDrift(_Entry):
    """One metric of one output in one profile, as the budget judges it, and its ``bound`` (None: unbounded).

    ``before`` (None if there was no such profile) and ``after`` are drift from the fp32 outputs of the original
    weights, ``own`` from those of the recovered weights.
    """

    profile: str
    output: str
    metric: str
    before: Number | None
    after: Number
    own: Number
    bound: Number | None = None


class RecoveryEntry(_Entry):
    """A recovery: ``recovered_from`` is the sha256 of its source, ``judged_on`` the origin of the judged samples."""

    recovered_from: str
    judged_on: str
    samples: Size
    held_out: bool
    training: TrainingEntry
    drift: list[RecoveredDrift] = []
