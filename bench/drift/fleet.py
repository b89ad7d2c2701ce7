"""Many replicas: how much sooner drift is seen in their pooled sums, how often wrongly, and how many alerts there are.

The replicas are :class:`service.drift.comparison.Comparison`, one each, with drawn drift. The pooled verdict is the one
of deploy/prometheus/rules/fleet.yml, as arrays; tests/deploy/test_fleet_rules.py compares the two. Alerts of a healthy
week are counted from the rates that are promised of each replica, those of a bad release by promtool, from the rules.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bench.drift.detector import poisson
from bench.drift.rules import WRONG, firing
from bench.drift.streams import Floats
from bf16kit.drift.budget import Budget
from bf16kit.drift.metrics import SampleDrift
from bf16kit.numerics.tensors import TensorSpec
from service.drift.comparison import Comparison
from service.drift.intervals import Z_ALWAYS
from service.drift.sampler import Sample
from service.telemetry.modelmetrics import ModelMetrics, moments

BUDGET = 0.015  # relative_l2, the default
REPLICAS = 50
HOUR = 60  # minutes; a replica measures one request in each
WEEK = 7 * 24 * HOUR
_REQUESTS, _WINDOWS, _RECENT, _KEPT = 100, (HOUR, 6 * HOUR), HOUR // 2, 10  # of the rule: effective requests, minutes
_BLOCK = 4096  # minutes that are simulated at once
_MOST = 400  # minutes until a replica has to have seen it
_FLEET = 1000
# What is promised of a healthy replica: one false alarm in ten weeks, each of the detector and of "over the budget".
_A_WEEK = 0.1
_MINUTES = {"Bf16DriftOverBudget": 11, "Bf16DriftChanged": 15}  # that an alert lasts at least, by its rule


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of traffic: its parts' shares of the requests, and the median and log spread of each part's drift."""

    name: str
    shares: tuple[float, ...]
    medians: tuple[float, ...]
    spread: float

    @property
    def mean(self) -> float:
        return float(np.dot(self.shares, self.medians)) * math.exp(self.spread**2 / 2)

    def draw(self, requests: int, rng: np.random.Generator) -> Floats:
        medians: Floats = rng.choice(self.medians, requests, p=self.shares)
        return medians * np.exp(self.spread * rng.standard_normal(requests))


# In units of the budget, of which the sound part has a quarter.
FAULTS = (
    Kind("1.2 times the budget, spread 0.3", (1.0,), (1.2,), 0.3),
    Kind("1.5 times the budget, spread 1", (1.0,), (1.5 * math.exp(-0.5),), 1.0),
    Kind("a row in twenty destroyed", (0.95, 0.05), (0.25, 1 / BUDGET), 0.3),
    Kind("a row in fifty destroyed", (0.98, 0.02), (0.25, 1 / BUDGET), 0.3),
)
SOUND = (
    Kind("spread 0.3", (1.0,), (1.0,), 0.3),
    Kind("spread 1", (1.0,), (1.0,), 1.0),
    Kind("5 % at ten times", (0.95, 0.05), (1.0, 10.0), 0.3),
    Kind("1 % at a hundred times", (0.99, 0.01), (1.0, 100.0), 0.3),
)


class _Pooled(ModelMetrics):
    """Metrics that add a replica's sums to those of all."""

    def __init__(self, sums: Floats) -> None:
        super().__init__("m", 1)
        self._sums = sums

    def judged_rows(self, output: str, rows: Sequence[SampleDrift], weight: float) -> None:
        self._sums += moments([row.relative_l2 for row in rows], weight)


def is_over(sums: Floats, budget: float = BUDGET) -> NDArray[np.bool_]:
    """Whether the pooled mean is over ``budget`` beyond chance, by the moments in the last axis of ``sums``."""
    weight, drift, weight2, product, drift2 = np.moveaxis(sums, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = drift / weight
        error = np.sqrt(np.maximum(drift2 - 2 * mean * product + mean**2 * weight2, 0)) / weight
        low = mean * np.exp(-Z_ALWAYS * error / mean)
        return np.asarray((low > budget) & (weight**2 / weight2 > _REQUESTS))


def is_over_in_a_window(totals: Floats) -> NDArray[np.bool_]:
    """Whether it is so in one of the windows that end at each minute, by the sums up to each minute, from 0 on.

    The mean of the last half hour must be over the budget, too.
    """

    def last(window: int) -> Floats:
        return np.asarray(totals - np.concatenate((np.zeros((window, 5)), totals))[: len(totals)])

    recent = last(_RECENT)
    still = recent[:, 1] > BUDGET * recent[:, 0]
    return np.asarray(still & np.logical_or.reduce([is_over(last(window)) for window in _WINDOWS]))


def minutes_until_seen(fault: Kind, rng: np.random.Generator) -> tuple[float, float]:
    """Return the minutes until all replicas together are over the budget, and the median until one is by itself.

    Each measures one request a minute, and the fault is there from the first on.
    """
    spec = TensorSpec("y", "float64", ("batch", 2), "other")
    budget = Budget.from_dict({"relative_l2": BUDGET})
    replicas = [Comparison([spec], 0, budget) for _ in range(REPLICAS)]
    totals, seen, pooled = np.zeros((_MOST + 1, 5)), np.full(REPLICAS, np.inf), math.inf
    for minute in range(1, _MOST + 1):
        drawn = BUDGET * fault.draw(REPLICAS, rng)
        totals[minute] = totals[minute - 1]
        metrics = _Pooled(totals[minute])
        metrics.opened(0, [spec])
        for number, (replica, drift) in enumerate(zip(replicas, drawn.tolist(), strict=True)):
            if np.isinf(seen[number]) or math.isinf(pooled):
                replica.observe({"y": np.ones((1, 2))}, _sample(drift), metrics)
                if replica.verdict().state == "over":
                    seen[number] = min(seen[number], minute)
        if math.isinf(pooled) and is_over_in_a_window(totals[: minute + 1])[-1]:
            pooled = minute
        if np.isfinite(np.median(seen)) and not math.isinf(pooled):
            break
    return pooled, float(np.median(seen))


def _sample(drift: float) -> Sample:
    served = np.array([[1.0 + drift * math.sqrt(2), 1.0]])
    return Sample({"x": np.zeros((1, 1), np.float32)}, {"y": served}, 1, 16, 1.0, "bf16", "cpu", "")


def false_alarms(kind: Kind, weeks: float, rng: np.random.Generator) -> int:
    """Return how many alerts the pooled verdict gives in so many weeks with a mean drift of exactly the budget.

    One request in ten is of a kind that is measured ten times as often as the others.
    """
    minutes = int(weeks * WEEK)
    each = np.empty((minutes + 1, 5))
    each[0] = 0.0
    for start in range(1, minutes + 1, _BLOCK):
        rows = min(_BLOCK, minutes + 1 - start)
        drift = kind.draw(rows * REPLICAS, rng).reshape(rows, REPLICAS) * BUDGET / kind.mean
        weight = np.where(rng.random(drift.shape) < 0.1, 1.0, 10.0)
        summands = weight, weight * drift, weight**2, weight**2 * drift, (weight * drift) ** 2
        each[start : start + rows] = np.stack([summand.sum(axis=1) for summand in summands], axis=1)
    minutes_over = np.flatnonzero(is_over_in_a_window(np.cumsum(each, axis=0)))
    return int(np.count_nonzero(np.diff(minutes_over, prepend=-np.inf) > _KEPT))


def grouped(minutes: float, rng: np.random.Generator) -> tuple[int, int]:
    """Return a healthy week's alerts of one kind: one for each replica, and one for all while any lasts."""
    starts = np.sort(rng.random(rng.poisson(_A_WEEK * _FLEET)) * WEEK)
    return len(starts), int(np.count_nonzero(np.diff(starts, prepend=-np.inf) > minutes))


def _alerts(wrong: str, counts: Mapping[tuple[str, str], int]) -> Iterator[Measurement]:
    for severity in ("critical", "warning"):
        names = sorted(alert for alert, level in counts if level == severity)
        total = sum(counts[name, severity] for name in names)
        detail = f"one for each replica: {len(names) * _FLEET:,}; {', '.join(names)}"
        yield Measurement(f"{wrong}, on {_FLEET} replicas: {severity}", total, detail=detail)


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Detection, false alarms and alerts of fleets."""
    rng = np.random.default_rng(26)
    found: list[Measurement] = []
    for fault in FAULTS:
        both = np.array([minutes_until_seen(fault, rng) for _ in range(1 if quick else 20)])
        pooled, alone = np.median(both, axis=0)
        name = f"{fault.name}: minutes until {REPLICAS} replicas together see it"
        found.append(Measurement(name, float(pooled), detail=f"one replica, a request a minute: {alone:g}"))
    weeks = 0.05 if quick else 100
    for kind in SOUND:
        alarms = false_alarms(kind, weeks, rng)
        interval = tuple(end / weeks for end in poisson(alarms))
        name = f"false alarms a week of {REPLICAS} replicas together, {kind.name}"
        found.append(Measurement(name, alarms / weeks, at_most=0.1, interval=(interval[0], interval[1])))
    for alert, minutes in _MINUTES.items():
        runs = np.array([grouped(minutes, rng) for _ in range(200)])
        before, after = runs.mean(axis=0)
        found.append(
            Measurement(
                f"healthy week of {_FLEET}, at most: {alert}", float(after), detail=f"one for each replica: {before:g}"
            )
        )
    promtool = shutil.which("promtool")
    if promtool is not None and not quick:
        found += (each for wrong in WRONG for each in _alerts(wrong, firing(promtool, wrong, _FLEET)))
    return Result(
        "drift_fleet",
        tuple(found),
        settings={"replicas": REPLICAS, "weeks": weeks, "promised of a replica, false alarms a week": _A_WEEK},
        notes=("simulated: drift is drawn, no model runs",),
    )
