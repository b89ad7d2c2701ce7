"""The settings of a recovery, parsed and checked before any long work begins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from bf16kit.messages.errors import UsageError

if TYPE_CHECKING:
    from converter.options import Target

Precision = Literal["bf16-mixed", "bf16-true", "16-mixed", "32-true"]
Loss = Literal["distillation", "cross-entropy"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
LOSSES: tuple[Loss, ...] = get_args(Loss)

# The values of P. Micikevicius et al., "Mixed Precision Training" (ICLR 2018), and of torch.amp.GradScaler: start far
# too high, halve at an overflow, double after 2,000 steps without one.
FIRST_SCALE = 2.0**16
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000
_LARGEST_SCALE = 2.0**127


@dataclass(frozen=True, slots=True)
class Scaling:
    """The scale that multiplies the loss before gradients are computed, and divides them afterwards.

    ``factor`` is the scale of ``static``, the first scale of ``dynamic``, and 1 for ``none``. ``interval`` is the
    number of steps without an overflow after which a dynamic scale doubles.
    """

    kind: Literal["none", "static", "dynamic"]
    factor: float = 1.0
    interval: int = INTERVAL

    def __str__(self) -> str:
        if self.kind == "static":
            return f"static={self.factor:g}"
        return f"dynamic={self.interval}" if self.kind == "dynamic" and self.interval != INTERVAL else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one recovery; ``checkpoint_every`` is the number of steps between checkpoints."""

    data: str
    evaluation: str | None
    steps: int
    precision: Precision
    scaling: Scaling
    loss: Loss
    learning_rate: float
    device: str
    checkpoint_every: int
    resume: bool

    def recorded(self, recovered_from: str) -> dict[str, Any]:
        """Return the settings that shaped the recovered weights, for the manifest."""
        return {
            "recovered_from": recovered_from,
            "steps": self.steps,
            "precision": self.precision,
            "loss_scaling": str(self.scaling),
            "loss": self.loss,
            "learning_rate": self.learning_rate,
        }


def parse_settings(given: Mapping[str, Any]) -> Settings:
    """Parse the command line's values; raise :class:`UsageError` for those that make no sense."""
    steps: int = given["steps"]
    if steps < 1:
        raise UsageError(
            f"--steps {steps}: a recovery takes 1 step or more; to convert without training use bf16-convert checkpoint"
        )
    rate: float = given["learning_rate"]
    if not (math.isfinite(rate) and 0 < rate < 1):
        raise UsageError(
            f"--learning-rate {rate:g}: expected more than 0 and less than 1, the share of a weight's size by which"
            " a step may move it; the default is 0.001"
        )
    precision: Precision = given["precision"]
    return Settings(
        data=given["data"],
        evaluation=given["evaluation"],
        steps=steps,
        precision=precision,
        scaling=parse_scaling(given["loss_scaling"], precision),
        loss=given["loss"],
        learning_rate=rate,
        device=given["device"],
        checkpoint_every=given["every"] or max(1, steps // 10),
        resume=given["resume"],
    )


def parse_scaling(text: str | None, precision: Precision) -> Scaling:
    """Parse ``none``, ``static=K``, ``dynamic`` or ``dynamic=STEPS``; for None, choose what ``precision`` needs.

    Raises :class:`UsageError` for another text, and for a scale if gradients are bf16: it has fp32's exponents, so that
    scaling is useless.
    """
    if text is None:
        return Scaling("dynamic", FIRST_SCALE) if precision == "16-mixed" else Scaling("none")
    kind, _, value = text.partition("=")
    scaling = _scaling(text, kind, value)
    if scaling.kind != "none" and precision != "16-mixed":
        raise UsageError(
            f"--loss-scaling {text}: --precision {precision} needs none, because bf16 has the exponents of fp32:"
            " gradients that underflow in bf16 underflow in fp32, too (the report has the measured shares); leave"
            " out --loss-scaling, or train with --precision 16-mixed"
        )
    return scaling


def _scaling(text: str, kind: str, value: str) -> Scaling:
    if kind == "none" and not value:
        return Scaling("none")
    if kind == "static" and value:
        return Scaling("static", _number(text, value))
    if kind == "dynamic":
        return Scaling("dynamic", FIRST_SCALE, _count(text, value) if "=" in text else INTERVAL)
    raise UsageError(f"--loss-scaling {text}: expected none, static=K (for example static=1024), dynamic or dynamic=N")


def _number(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise UsageError(f"--loss-scaling {text}: {value!r} is not a number; for example static=1024") from None
    if not 1 <= number <= _LARGEST_SCALE:  # rejects NaN too
        raise UsageError(f"--loss-scaling {text}: expected a scale from 1 to 2**127; for example static=1024")
    return number


def _count(text: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and 1 <= int(value) < 2**31):
        raise UsageError(
            f"--loss-scaling {text}: {value!r} is not a number of steps; expected 1 or more, the steps after"
            " which the scale doubles"
        )
    return int(value)


def recovery_path(target: Target) -> Path:
    """Return the directory beside ``target`` from which an interrupted recovery can be resumed."""
    return target.path.with_name(f".{target.path.name}.recovery")
