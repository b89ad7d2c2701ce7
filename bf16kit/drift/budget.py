"""The budget: the largest drift an owner accepts, and the check of measured drift against it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from bf16kit.messages.errors import UsageError

if TYPE_CHECKING:
    from bf16kit.drift.metrics import DriftSummary

METRICS = ("relative_l2", "cosine_distance", "max_abs", "sqnr_db", "top1_agreement", "nonfinite", "slice_error")
QUANTILES = ("p50", "p99", "worst")  # that a bound may name, for example relative_l2.p99
_FLOORS = ("sqnr_db", "top1_agreement")  # larger is better
_NO_QUANTILES = ("top1_agreement", "nonfinite", "slice_error")  # one number for all samples
_DEFAULT = MappingProxyType(
    {
        "relative_l2": 1.5e-2,
        "relative_l2.p99": 0.1,  # of two numbers per row at the bound on the mean it is 0.095 (docs/decisions/0085)
        "cosine_distance": 5e-4,
        "top1_agreement": 0.99,
        "nonfinite": 0.0,
        "slice_error": 0.5,
    }
)


@dataclass(frozen=True, slots=True)
class Breach:
    """One output over budget in one metric, or in one quantile of a metric; ``metric`` is the bound's name.

    ``where`` is the part of the output that was measured, "" for all of it.
    """

    output: str
    metric: str
    measured: float
    bound: float
    where: str = ""

    def __str__(self) -> str:
        relation = "at least" if _metric(self.metric) in _FLOORS else "at most"
        part = f" of {self.where}" if self.where else ""
        return (
            f"output {self.output!r}: {self.metric}{part} is {self.measured:.3g},"
            f" the budget allows {relation} {self.bound:.3g}"
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds on drift by name; a metric without a bound is unbounded. The defaults are the project's.

    A name is a metric, or a metric and one of :data:`QUANTILES`: ``relative_l2.p99``. A bound applies to the number
    that :meth:`bf16kit.drift.metrics.DriftSummary.judged` returns for each output: an upper bound, but for
    ``top1_agreement`` and ``sqnr_db`` a lower one. ``stated`` names those that an owner set, rather than the project.
    """

    bounds: Mapping[str, float] = field(default_factory=lambda: _DEFAULT)
    stated: frozenset[str] = field(default=frozenset(), compare=False)

    @classmethod
    def parse(cls, texts: Iterable[str], base: Budget | None = None) -> Budget:
        """Return ``base`` (or the default budget) changed by texts like ``relative_l2=1e-2``; UsageError for others."""
        changes: dict[str, float | None] = {}
        for text in texts:
            name, equals, value = (part.strip() for part in text.partition("="))
            if not equals:
                raise UsageError(f"budget {text!r}: expected METRIC=NUMBER, for example relative_l2=1e-2")
            try:
                changes[name] = None if value.lower() == "none" else float(value)
            except ValueError:
                raise UsageError(f"budget {text!r}: {value!r} is not a number") from None
        return (base or cls()).override(changes)

    @classmethod
    def from_dict(cls, bounds: Mapping[str, float]) -> Budget:
        """Return the budget that :meth:`as_dict` wrote; a metric that is absent is unbounded."""
        return cls({}).override(bounds)

    def as_dict(self) -> dict[str, float]:
        """Return the bounds by name, in the order of the metrics."""
        return {name: float(self.bounds[name]) for name in sorted(self.bounds, key=_rank)}

    def bound(self, name: str) -> float | None:
        """Return the bound called ``name``, or None if there is none."""
        return self.bounds.get(name)

    def override(self, bounds: Mapping[str, float | None]) -> Budget:
        """Return this budget with some bounds changed; UsageError for an unknown name or a bound out of range."""
        changed = dict(self.bounds)
        for name, bound in bounds.items():
            _check(name, bound)
            if bound is None:
                changed.pop(name, None)
            else:
                changed[name] = bound
        stated = self.stated | {name for name, bound in bounds.items() if bound is not None}
        return Budget(MappingProxyType(changed), stated)

    def rows_to_judge(self) -> int:
        """Return how many rows it takes to judge top1_agreement: with fewer, a single one that differs breaks it."""
        bound = self.bounds.get("top1_agreement")
        if bound is None:
            return 0
        return math.ceil(1 / (1 - bound) - 1e-9) if bound < 1 else 100

    def tightened(self, share: float) -> Budget:
        """Return this budget with every bound scaled to allow ``share`` of the drift, as :meth:`ratio` counts it."""
        return Budget(MappingProxyType({name: _tighter(name, bound, share) for name, bound in self.bounds.items()}))

    def breaches(self, output: str, summary: DriftSummary) -> list[Breach]:
        """Return the bounds that ``summary`` of ``output`` breaks, in the order of the metrics; empty within budget."""
        found = []
        for name, bound in self.as_dict().items():
            measured = summary.judged(name)
            if measured is not None and not _within(name, measured, bound):
                found.append(Breach(output, name, measured, bound, summary.where(name)))
        return found

    def ratio(self, name: str, measured: float) -> float:
        """Return drift ÷ budget: over 1 is a breach, 0 when ``name`` is unbounded.

        For ``top1_agreement`` it is the ratio of the disagreements (1 − agreement), for ``sqnr_db`` that of the noise
        amplitudes (20 dB are a factor of 10).
        """
        bound = self.bound(name)
        if bound is None:
            return 0.0
        if _metric(name) == "sqnr_db":
            exponent = (bound - measured) / 20.0
            return 10.0**exponent if exponent < 308 else math.inf
        if name == "top1_agreement":
            measured, bound = 1.0 - measured, 1.0 - bound
        if bound == 0:
            return 0.0 if measured == 0 else math.inf
        return measured / bound

    def measured(self, name: str, ratio: float) -> float | None:
        """Return the measured value that gives this :meth:`ratio`, or None when the ratio does not determine it."""
        bound, decibels = self.bound(name), _metric(name) == "sqnr_db"
        if bound is None or not math.isfinite(ratio) or (decibels and ratio == 0):
            return None
        if ratio > 0 and not decibels and bound == (1.0 if name == "top1_agreement" else 0.0):
            return None
        return _tighter(name, bound, ratio)


def _metric(name: str) -> str:
    return name.partition(".")[0]


def _rank(name: str) -> tuple[int, int]:
    metric, _, quantile = name.partition(".")
    return METRICS.index(metric), QUANTILES.index(quantile) if quantile else -1


def _within(name: str, measured: float, bound: float) -> bool:
    return measured >= bound if _metric(name) in _FLOORS else measured <= bound


def _tighter(name: str, bound: float, share: float) -> float:
    if _metric(name) == "sqnr_db":
        return bound - 20.0 * math.log10(share)
    return 1.0 - (1.0 - bound) * share if name == "top1_agreement" else bound * share


def _check(name: str, bound: float | None) -> None:
    metric, dot, quantile = name.partition(".")
    if metric not in METRICS:
        raise UsageError(f"budget: unknown metric {metric!r}; metrics are {', '.join(METRICS)}")
    if dot and quantile not in QUANTILES:
        raise UsageError(f"budget {name!r}: unknown quantile {quantile!r}; quantiles are {', '.join(QUANTILES)}")
    if dot and metric in _NO_QUANTILES:
        raise UsageError(
            f"budget {name!r}: {metric} is one number for all samples and has no quantiles; bound it itself"
        )
    if bound is not None and (not math.isfinite(bound) or (bound < 0 and metric != "sqnr_db")):
        raise UsageError(f"budget: {name}={bound} is out of range; give a finite number, 0 or more, or none")
    if bound is not None and name == "top1_agreement" and bound > 1:
        raise UsageError(f"budget: top1_agreement={bound} is a share, between 0 and 1")
