"""The budget: the largest drift an owner accepts, and whether what was measured keeps to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from bf16kit.errors import UsageError

METRICS = ("relative_l2", "cosine_distance", "max_abs", "sqnr_db", "top1_agreement", "nonfinite")
_FLOORS = ("sqnr_db", "top1_agreement")  # larger is better


class Measured(Protocol):
    """What a budget judges: a :class:`bf16kit.drift.DriftSummary`."""

    def judged(self, metric: str) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Breach:
    """One output over budget in one metric."""

    output: str
    metric: str
    measured: float
    bound: float

    def __str__(self) -> str:
        relation = "at least" if self.metric in _FLOORS else "at most"
        return (
            f"output {self.output!r}: {self.metric} is {self.measured:.3g},"
            f" the budget allows {relation} {self.bound:.3g}"
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds on drift, ``None`` where there is none; the defaults are the project's.

    They bound what :meth:`bf16kit.drift.DriftSummary.judged` says, of every output: ``relative_l2``,
    ``cosine_distance``, ``max_abs`` and ``nonfinite`` from above, ``top1_agreement`` and ``sqnr_db`` from below.
    """

    relative_l2: float | None = 1.5e-2
    cosine_distance: float | None = 5e-4
    top1_agreement: float | None = 0.99
    nonfinite: float | None = 0
    max_abs: float | None = None
    sqnr_db: float | None = None

    @classmethod
    def parse(cls, texts: Iterable[str], base: Budget | None = None) -> Budget:
        """``base`` (the default budget) changed by texts like ``relative_l2=1e-2`` or ``max_abs=none``; UsageError."""
        changes: dict[str, float | None] = {}
        for text in texts:
            metric, equals, value = (part.strip() for part in text.partition("="))
            if not equals:
                raise UsageError(f"budget {text!r}: expected METRIC=NUMBER, for example relative_l2=1e-2")
            changes[metric] = _number(text, value)
        return (base or cls()).override(changes)

    @classmethod
    def from_dict(cls, bounds: Mapping[str, float]) -> Budget:
        """The budget that :meth:`as_dict` wrote: a metric that is not there is unbounded."""
        return cls(None, None, None, None).override(bounds)

    def as_dict(self) -> dict[str, float]:
        """The bounds there are, by metric."""
        return {metric: float(bound) for metric, bound in asdict(self).items() if bound is not None}

    def override(self, bounds: Mapping[str, float | None]) -> Budget:
        """This budget with some bounds changed; UsageError for an unknown metric or a bound that bounds nothing."""
        for metric, bound in bounds.items():
            if metric not in METRICS:
                raise UsageError(f"budget: unknown metric {metric!r}; metrics are {', '.join(METRICS)}")
            if bound is not None:
                _check_bound(metric, bound)
        return replace(self, **bounds)

    def breaches(self, output: str, summary: Measured) -> list[Breach]:
        """Where ``summary`` of ``output`` is over this budget, in the order of the metrics; empty when within it."""
        found = []
        for metric, bound in self.as_dict().items():
            measured = summary.judged(metric)
            if measured is not None and not _within(metric, measured, bound):
                found.append(Breach(output, metric, measured, bound))
        return found

    def ratio(self, metric: str, measured: float) -> float:
        """Drift ÷ budget: over 1 is a breach, 0 when the metric is unbounded.

        For ``top1_agreement`` of the disagreements, for ``sqnr_db`` of the noise amplitudes (20 dB are a factor of 10).
        """
        bound: float | None = getattr(self, metric)
        if bound is None:
            return 0.0
        if metric == "sqnr_db":
            return _power(10.0, (bound - measured) / 20.0)
        if metric == "top1_agreement":
            measured, bound = 1.0 - measured, 1.0 - bound
        if bound == 0:
            return 0.0 if measured == 0 else math.inf
        return measured / bound


def _within(metric: str, measured: float, bound: float) -> bool:
    return measured >= bound if metric in _FLOORS else measured <= bound


def _number(text: str, value: str) -> float | None:
    if value.lower() == "none":
        return None
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"budget {text!r}: {value!r} is not a number") from None


def _check_bound(metric: str, bound: float) -> None:
    if not math.isfinite(bound) or (bound < 0 and metric != "sqnr_db"):
        raise UsageError(f"budget: {metric}={bound} is out of range; give a finite number, 0 or more, or none")
    if metric == "top1_agreement" and bound > 1:
        raise UsageError(f"budget: top1_agreement={bound} is a share, between 0 and 1")


def _power(base: float, exponent: float) -> float:
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return math.inf
