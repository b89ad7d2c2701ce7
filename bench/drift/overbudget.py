"""The state ``over`` over weeks of simulated traffic: how often chance alone reports it, and how soon a breach does.

The statistics are those of :mod:`service.drift.recent`, as arrays; a test compares the two. The bounds are the default
budget's on relative_l2 and cosine_distance, and each row is a request. The traffic is hard for such statistics: its
mean is within the budget, and most of it comes from a few rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bench.drift.detector import poisson
from bf16kit.drift.metrics import Budget
from bf16kit.numerics.tensors import TensorSpec
from service.drift.calibration import Calibration
from service.drift.comparison import Comparison
from service.drift.detector import WEEK
from service.drift.intervals import Z_ALWAYS, Z_RANKS, Z, ranks, student
from service.drift.recent import HALF_LIFE, MIN_EFFECTIVE_SIZE, REQUESTS
from service.drift.sampler import Sample
from service.telemetry.modelmetrics import ModelMetrics

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Draw = Callable[[np.random.Generator, int], Floats]  # relative_l2 of so many rows

BOUNDS = Budget()
HEALTHY = 3.7e-3  # a quarter of the budget, as MiniLM has it
_DECAY = np.exp2(-np.arange(REQUESTS) / HALF_LIFE)
_FFT = 1 << 16
_RUNS, _MOST = 50, 4000  # breaches of each kind; samples until one counts as not found
_HEALTHY_FIRST, _SIZE = 200, 16
_PROMISE = 0.1  # false episodes a week: one in ten weeks
_WEEKS = 40  # 37 without an episode show that there are fewer, with 95 % confidence
_AT_THE_BORDER, _MORE_WEEKS = "1 row in 100 at 0.2", 200
#: Unequal weights, as of traffic that comes and goes: 62 % of the samples stand for busy times, the others for quiet
#: ones, of which a larger share is measured.
_COMMON, _WEIGHTS = 0.617, (1.46, 0.26)


@dataclass(frozen=True, slots=True)
class Rows:
    """Relative_l2 and cosine distance of rows, one a request, and the requests' weights."""

    relative_l2: Floats
    cosine: Floats
    weights: Floats


def lognormal(spread: float, scale: float = 1.0) -> Draw:
    """Return rows whose logarithm has this spread, ``scale`` times as far off as a healthy model's."""
    return lambda rng, count: HEALTHY * scale * np.exp(spread * rng.standard_normal(count))


def heavy(spread: float) -> Draw:
    """Student's t of three degrees of freedom on the logarithm."""
    return lambda rng, count: HEALTHY * np.exp(spread * rng.standard_t(3, count) / math.sqrt(3))


def mixed(share: float, drift: float) -> Draw:
    """A ``share`` of the rows has this drift, the others are healthy."""
    healthy = lognormal(0.1)
    return lambda rng, count: np.where(rng.uniform(size=count) < share, drift, healthy(rng, count))


WITHIN: Mapping[str, Draw] = {  # the last but one has a p99 exactly at its bound
    "lognormal, spread 0.1": lognormal(0.1),
    "t with 3 degrees, spread 0.1": heavy(0.1),
    "t with 3 degrees, spread 0.3": heavy(0.3),
    "1 row in 10,000 at 0.4": mixed(1e-4, 0.4),
    "1 row in 1,000 at 0.4": mixed(1e-3, 0.4),
    "3 rows in 1,000 at 0.4": mixed(3e-3, 0.4),
    "1 row in 100 at 0.2": mixed(1e-2, 0.2),
    "1 row in 10,000 destroyed": mixed(1e-4, 1.4),
}
BREACHES: Mapping[str, tuple[Draw, float | None]] = {  # and the goal for the median number of samples
    "all rows at 1.5 × the budget": (lognormal(0.1, 1.5 * 0.015 / HEALTHY), 20),
    "all rows at 2 × the budget, spread 0.3": (lognormal(0.3, 2 * 0.015 / HEALTHY), 20),
    "5 % of rows destroyed": (mixed(0.05, 1.4), 100),
    "1 % of rows destroyed": (mixed(0.01, 1.4), None),
    "0.2 % of rows destroyed": (mixed(0.002, 1.4), None),
    "5 % of rows at 10 × the budget": (mixed(0.05, 0.15), None),
    "2 % of rows at 10 × the budget": (mixed(0.02, 0.15), None),
    "1 % of rows at 10 × the budget": (mixed(0.01, 0.15), None),
}


def draw(traffic: Draw, rng: np.random.Generator, count: int) -> Rows:
    """Return so many rows; a row in another direction has a cosine distance of 1 at most."""
    relative_l2 = np.minimum(traffic(rng, count), 1.4)
    weights = np.where(rng.uniform(size=count) < _COMMON, *_WEIGHTS)
    return Rows(relative_l2, np.minimum(relative_l2**2 / 2, 1.0), weights)


def over(rows: Rows) -> Bools:
    """Return whether the state is ``over`` after each row, for any of the bounds."""
    found = np.zeros(len(rows.weights), bool)
    for name, values in (("relative_l2", rows.relative_l2), ("cosine_distance", rows.cosine)):
        if (bound := BOUNDS.bound(name)) is not None:
            found |= _latched(*(low > bound for low in lower_ends(values, rows.weights)))
        if (bound := BOUNDS.bound(f"{name}.p99")) is not None:
            found |= _latched(*tail_breaches(values > bound, rows.weights))
    return found


def lower_ends(values: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Return the lower ends of the mean's wide and narrow intervals after each row (:func:`intervals.mean`)."""
    total, squares = _recent(weights, _DECAY), _recent(weights**2, _DECAY**2)
    mean, size = _recent(weights * values, _DECAY) / total, total**2 / squares
    crossed = _recent(weights**2 * values, _DECAY**2)
    variance = _recent((weights * values) ** 2, _DECAY**2) - 2 * mean * crossed + mean**2 * squares
    enough = size >= MIN_EFFECTIVE_SIZE
    size = np.where(enough, size, MIN_EFFECTIVE_SIZE)
    error = np.sqrt(np.maximum(variance, 0.0) * size / (size - 1)) / total / mean

    def low(z: float) -> Floats:
        grid = np.linspace(MIN_EFFECTIVE_SIZE, 2 * REQUESTS, 1 << 16)
        t_quantile = np.interp(size, grid, [student(each - 1, z) for each in grid])
        return np.where(enough, mean * np.exp(-np.minimum(t_quantile * error, 700.0)), 0.0)

    return low(Z_ALWAYS), low(Z)


def tail_breaches(beyond: Bools, weights: Floats) -> tuple[Bools, Bools]:
    """Return whether the p99's wide and narrow intervals begin above the bound, after each row
    (:func:`intervals.quantile`). ``beyond``: which rows are over the bound."""
    total, squares = _recent(weights, _DECAY), _recent(weights**2, _DECAY**2)
    below, size = _recent(weights * ~beyond, _DECAY) / total, (total**2 / squares).astype(int)

    def breached(z: float) -> Bools:
        lows = np.array([ranks(n, 0.99, z)[0] / max(n, 1) for n in range(int(size.max()) + 1)])
        return np.asarray((below < lows[size] - 1e-9) & (size >= MIN_EFFECTIVE_SIZE))

    return breached(Z_RANKS), breached(Z)


def _latched(begins: Bools, lasts: Bools) -> Bools:
    """Return a state that begins with ``begins`` and ends when ``lasts``, which it implies, is false."""
    ended = np.flatnonzero(~lasts)
    found = np.zeros(len(lasts), bool)
    at = 0
    for start in np.flatnonzero(begins):
        if start >= at:
            following = np.searchsorted(ended, start)
            at = int(ended[following]) if following < len(ended) else len(lasts)
            found[start:at] = True
    return found


def _recent(values: Floats, decay: Floats) -> Floats:
    """Return Σ decay · values over the newest rows, after each row, by convolution in blocks."""
    step, transformed = _FFT - len(decay) + 1, np.fft.rfft(decay, _FFT)
    padded = np.concatenate((np.zeros(len(decay) - 1), values))
    blocks = [
        np.fft.irfft(np.fft.rfft(padded[start : start + _FFT], _FFT) * transformed, _FFT)[len(decay) - 1 :]
        for start in range(0, len(values), step)
    ]
    return np.concatenate(blocks)[: len(values)]


def episodes(traffic: Draw, weeks: float, rng: np.random.Generator) -> int:
    """Return how often the state becomes ``over`` in so many weeks, at one sample a second."""
    count = 0
    for _ in range(math.ceil(weeks)):
        state = over(draw(traffic, rng, int(min(weeks, 1.0) * WEEK)))
        count += int(state[0]) + int((state[1:] & ~state[:-1]).sum())
    return count


def delay(traffic: Draw, rng: np.random.Generator, most: int = _MOST) -> float:
    """Return the number of samples until a server says ``over``, after 200 healthy ones; infinite: not in ``most``.

    The whole of :class:`service.drift.comparison.Comparison` judges outputs of 16 elements. Each sample is one row, and
    all weigh the same, as of steady traffic.
    """
    healthy = lognormal(0.1)
    calibration = Calibration({"cpu": {"y": [float(value) for value in healthy(rng, 200)]}})
    spec = TensorSpec("y", "float32", ("batch", _SIZE), "embedding")
    comparison, metrics = Comparison([spec], 0, BOUNDS, calibration=calibration), ModelMetrics("m", 1)
    metrics.opened(0, [spec])
    drifts = np.concatenate((healthy(rng, _HEALTHY_FIRST), np.minimum(traffic(rng, most), 1.4)))
    references = rng.standard_normal((len(drifts), 1, _SIZE))
    served = _rotated(references, 2 * np.arcsin(drifts / 2), rng)
    for count, (reference, found) in enumerate(zip(references, served, strict=True), 1):
        sample = Sample({}, {"y": found.astype(np.float32)}, 1, 0, 1.0, "bf16", "cpu")
        comparison.observe({"y": reference.astype(np.float32)}, sample, metrics)
        if count > _HEALTHY_FIRST and comparison.verdict().state == "over":
            return count - _HEALTHY_FIRST
    return math.inf


def _rotated(vectors: Floats, angles: Floats, rng: np.random.Generator) -> Floats:
    """Return each vector turned by its angle in a random direction: its cosine distance is relative_l2² / 2."""
    others = rng.standard_normal(vectors.shape)
    squares = np.square(vectors).sum(axis=-1, keepdims=True)
    others -= vectors * (vectors * others).sum(axis=-1, keepdims=True) / squares
    others *= np.sqrt(squares / np.square(others).sum(axis=-1, keepdims=True))
    turn = angles[:, None, None]
    return np.asarray(vectors * np.cos(turn) + others * np.sin(turn))


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """False episodes a week with Poisson's 95 % interval; median and 95th percentile of the samples until a breach."""
    runs = 2 if quick else _RUNS
    found: list[Measurement] = []
    for index, (name, traffic) in enumerate(WITHIN.items()):
        weeks = 0.05 if quick else _MORE_WEEKS if name == _AT_THE_BORDER else _WEEKS
        count = episodes(traffic, weeks, np.random.default_rng(index))
        low, high = poisson(count)
        found.append(
            Measurement(
                f"{name}: falsely over budget, times a week",
                count / weeks,
                at_most=_PROMISE,
                interval=(low / weeks, high / weeks),
                detail=f"{count} in {weeks:g} weeks",
            )
        )
    for index, (name, (traffic, goal)) in enumerate(BREACHES.items()):
        delays = [delay(traffic, np.random.default_rng((index, run))) for run in range(runs)]
        median, most = np.quantile(delays, (0.5, 0.95), method="higher")
        found.append(
            Measurement(
                f"{name}: samples until over budget, median",
                float(median),
                at_most=goal,
                detail=f"95th percentile {most:g}; not in {_MOST:,}: {sum(map(math.isinf, delays))} of {runs}",
            )
        )
    return Result(
        "drift_over_budget",
        tuple(found),
        settings={"samples a second": 1, "breaches of each": runs},
        notes=("simulated: drift is drawn, no model runs",),
    )
