"""Recovery: a short fine-tuning after which a model's bf16 outputs match those of its original fp32 weights."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bf16kit.messages.errors import UsageError

PRECISIONS = ("bf16-mixed", "bf16-true", "16-mixed", "32-true")
_SCALING = re.compile(r"none|static=[1-9]\d{0,37}|dynamic(=[1-9]\d{0,8})?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one recovery; ``every`` is the number of steps between checkpoints."""

    data: str
    evaluation: str | None
    steps: int
    precision: str
    loss_scaling: str
    learning_rate: float
    device: str
    every: int
    resume: bool


def parse_scaling(text: str | None, precision: str) -> str:
    """Return the scaling ``text``, or for None what ``precision`` needs; raise :class:`UsageError` if it is wrong."""
    if text is None:
        return "dynamic" if precision == "16-mixed" else "none"
    if not _SCALING.fullmatch(text):
        raise UsageError(
            f"--loss-scaling {text}: expected none, static=K with a whole K of at most 38 digits, dynamic,"
            " or dynamic=N, N being the steps after which the scale doubles"
        )
    if text != "none" and precision != "16-mixed":
        raise UsageError(
            f"--loss-scaling {text}: --precision {precision} needs none, because bf16 has the exponents of fp32; leave"
            " it out, or train with --precision 16-mixed"
        )
    return text
