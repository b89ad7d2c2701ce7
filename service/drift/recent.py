"""Recent drift of one output, and each bound's drift ÷ budget with its intervals.

Recent are the newest :data:`REQUESTS` measured requests, but none from before the last detected change. A request's
weight halves with every :data:`HALF_LIFE` requests after it. A row's weight is 1 ÷ its sampling probability, so the
estimate is for the drift of all answered rows.

At most :data:`PER_REQUEST` rows of one request are kept. Its rows are much alike and confidence is counted in requests,
so this leaves room for all recent requests, whatever their size. The kept rows include the worst of each metric, for
bounds on the worst row and on values that are not finite; each of these counts as one row. The others are evenly
spaced, because a client may have sorted its rows, and share the weight of all remaining rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bf16kit.drift.metrics import DISTRIBUTIONS, Budget, SampleDrift
from service.drift import weighted
from service.drift.weighted import Interval, Values

HALF_LIFE = 400  # measured requests
REQUESTS = 2048  # an older request would weigh less than a thirtieth
PER_REQUEST = 8  # rows; the default of shadow.max_rows
_ROWS = REQUESTS * PER_REQUEST  # capacity in rows: enough for all recent requests
_DECAY = np.exp2(-np.arange(REQUESTS) / HALF_LIFE)  # the weight of a request by the number of requests after it
_Scalar = TypeVar("_Scalar", bound=np.generic)
MIN_EFFECTIVE_SIZE = 8.0  # effective samples; below them no interval is given
_QUANTILES = {"p50": 0.5, "p99": 0.99}
_COLUMNS = (*DISTRIBUTIONS, "top1_matches", "top1_rows", "nonfinite")
_WORSE_SIGN = {
    "relative_l2": 1,
    "cosine_distance": 1,
    "max_abs": 1,
    "sqnr_db": -1,
    "nonfinite": 1,
}  # 1: larger is worse; -1: smaller is worse


@dataclass(frozen=True, slots=True)
class Estimate:
    """One bound's drift ÷ budget (over 1 is a breach), its 95 % interval, and the lower end of its wide one.

    ``lowest`` over 1 establishes a breach although it is looked at after every sample (:mod:`service.drift.weighted`).
    ``confirmable``: so many samples can show that the bound is met.
    """

    metric: str
    ratio: float
    low: float
    high: float
    lowest: float
    confirmable: bool = True

    @property
    def within(self) -> bool:
        """Whether the bound is met: with 95 % confidence, or by the estimate if no such samples could confirm it.

        Otherwise a model whose requests differ much in size, so that samples are worth few, would never be within a
        budget that bounds a p99.
        """
        return self.high <= 1 or (not self.confirmable and self.ratio <= 1)


@dataclass(frozen=True, slots=True)
class Window:
    """Recent rows, the oldest first: a column per metric, the rows' weights, and each row's request, numbered from 0,
    and client."""

    columns: NDArray[np.float64]  # [metrics, rows]
    weights: Values
    clusters: NDArray[np.int64]
    clients: NDArray[np.int64]  # hashes
    size: float  # effective samples

    def __getitem__(self, metric: str) -> Values:
        column: Values = self.columns[_COLUMNS.index(metric)]
        return column

    def select(self, kept: NDArray[np.bool_]) -> Window:
        """Return only the rows where ``kept`` is true."""
        weights, clusters = self.weights[kept], self.clusters[kept]
        size = weighted.effective_size(weights, clusters)
        return Window(self.columns[:, kept], weights, clusters, self.clients[kept], size)


class RecentRows:
    """The recent rows of one output, in ring buffers.

    The rows of the newest requests are contiguous, modulo the size.
    """

    def __init__(self) -> None:
        self._columns = np.zeros((len(_COLUMNS), _ROWS))
        self._weights = np.zeros(_ROWS)
        self._requests = np.zeros(_ROWS, np.int64)  # counted from 1
        self._clients = np.zeros(_ROWS, np.int64)
        self._first_rows = [0] * REQUESTS  # first row of each request, by request number modulo REQUESTS
        self._next = self._request = self._since = 0

    def add(self, drifts: Sequence[SampleDrift], weight: float, client: str = "") -> None:
        """Add one request's rows, each of which stands for ``weight`` rows."""
        self._request += 1
        self._first_rows[self._request % REQUESTS] = self._next
        values = np.array([[getattr(drift, name) for drift in drifts] for name in _COLUMNS], np.float64)
        kept, shares = _select_rows(values)
        count = values[_COLUMNS.index("nonfinite")]
        count[count.argmax()] += count.sum() - count[kept].sum()  # rows that are not kept still count
        entries = np.arange(self._next, self._next + len(kept)) % _ROWS
        self._columns[:, entries] = values[:, kept]
        self._weights[entries], self._requests[entries] = weight * shares, self._request
        self._clients[entries] = hash(client)
        self._next += len(kept)

    def keep_newest(self, requests: int) -> None:
        """Forget all but the newest ``requests``, because older ones are from before a change."""
        self._since = self._request - requests + 1

    def fewest_to_judge(self) -> int:
        """Return how many of the newest requests are worth :data:`MIN_EFFECTIVE_SIZE` samples; all if none are."""
        window = self.window()
        per_request = np.bincount(window.clusters, window.weights)[::-1]  # the newest first
        enough = np.square(per_request.cumsum()) >= MIN_EFFECTIVE_SIZE * np.square(per_request).cumsum()
        return int(enough.argmax()) + 1 if enough.any() else len(enough)

    def window(self) -> Window:
        """Return the recent rows. The arrays may be views, valid until the next request is added."""
        oldest = max(1, self._since, self._request - REQUESTS + 1)
        first_row = self._first_rows[oldest % REQUESTS] if oldest <= self._request else self._next
        requests = self._rows(self._requests, first_row)
        weights = self._rows(self._weights, first_row) * _DECAY[self._request - requests]
        clusters = requests - oldest
        size = weighted.effective_size(weights, clusters)
        return Window(
            self._rows(self._columns, first_row), weights, clusters, self._rows(self._clients, first_row), size
        )

    def _rows(self, ring: NDArray[_Scalar], first_row: int) -> NDArray[_Scalar]:
        """Return the rows from ``first_row`` on, the oldest first.

        Copies only if they wrap around the end of the ring.
        """
        start = first_row % _ROWS
        end = start + self._next - first_row
        if end <= _ROWS:
            return ring[..., start:end]
        return np.concatenate((ring[..., start:], ring[..., : end - _ROWS]), axis=-1)


def _select_rows(values: NDArray[np.float64]) -> tuple[NDArray[np.int64], Values]:
    """Return the indices of the rows of ``values`` [metrics, rows] to keep, and how many rows each stands for."""
    rows = values.shape[1]
    if rows <= PER_REQUEST:
        return np.arange(rows), np.ones(rows)
    worst = np.unique([(sign * values[_COLUMNS.index(name)]).argmax() for name, sign in _WORSE_SIGN.items()])
    others = np.setdiff1d(np.arange(rows), worst)
    room = PER_REQUEST - len(worst)
    spaced = others[((np.arange(room) + 0.5) * len(others) / room).astype(np.int64)]
    return np.concatenate((worst, spaced)), np.repeat((1.0, len(others) / room), (len(worst), room))


def estimates(window: Window, budget: Budget) -> Iterator[Estimate]:
    """Yield the estimate of every bound that the rows have a metric for, in the budget's order.

    ``.worst``, ``max_abs`` and ``nonfinite`` bound the measured rows themselves, so their intervals have no width. If
    none of n effective samples is over such a bound, at most 3 ÷ n of all answered rows are (with 95 % confidence).
    """
    for bound in budget.as_dict():
        found = _interval(window, bound)
        if found is not None:
            ratio, low, high, lowest, highest = (budget.ratio(bound, value) for value in _clipped(found, bound))
            high, low = max(low, high), min(low, high)
            confirmable = window.size < MIN_EFFECTIVE_SIZE or _is_confirmable(window, budget, bound, high)
            yield Estimate(bound, ratio, low, high, min(lowest, highest), confirmable)


def _is_confirmable(window: Window, budget: Budget, bound: str, high: float) -> bool:
    """Return whether so many samples, were all of them good, could show with 95 % confidence that the bound is met."""
    if bound == "top1_agreement":
        return budget.ratio(bound, weighted.wilson(1.0, window.size)[0]) <= 1
    return bound.partition(".")[2] not in _QUANTILES or math.isfinite(high)


def _interval(window: Window, bound: str) -> Interval | None:
    metric, _, part = bound.partition(".")
    if metric == "slice_error":
        return None  # of many rows together: see service.drift.liveslices
    if metric == "nonfinite":
        return Interval.exact(float(window["nonfinite"].sum()))
    if metric == "top1_agreement":
        return _agreement(window)
    values = window[metric]
    if part == "worst" or (metric == "max_abs" and not part):
        return Interval.exact(float(values.min() if metric == "sqnr_db" else values.max()))
    if part:
        return _quantile(window, metric, _QUANTILES[part])
    return _mean(window, metric)


def _mean(window: Window, metric: str) -> Interval:
    """Return the mean as :class:`bf16kit.drift.metrics.DriftSummary` defines it.

    It is infinite if the worst value is. Rows of +inf dB, which are exact, are left out.
    """
    values, weights, clusters, size = window[metric], window.weights, window.clusters, window.size
    floor = metric == "sqnr_db"
    worst = float(values.min() if floor else values.max())
    if math.isinf(worst):
        return Interval.exact(worst)
    finite = np.isfinite(values)
    if not finite.all():
        values, weights, clusters = values[finite], weights[finite], clusters[finite]
        size = weighted.effective_size(weights, clusters)
    if min(window.size, size) < MIN_EFFECTIVE_SIZE:
        return Interval.unbounded(float(np.average(values, weights=weights)))
    return weighted.mean(values, weights, clusters, positive=not floor, size=size)


def _quantile(window: Window, metric: str, share: float) -> Interval:
    sign = -1.0 if metric == "sqnr_db" else 1.0  # the quantile is taken on the bad side
    found = weighted.quantile(sign * window[metric], window.weights, share, max(window.size, 1.0))
    if window.size < MIN_EFFECTIVE_SIZE:
        found = Interval.unbounded(found.estimate)
    return Interval(*(sign * value for value in found))


def _agreement(window: Window) -> Interval | None:
    """Return the share of rows with the same top-1.

    The interval counts effective samples: rows of a request are dependent.
    """
    rows = float(np.dot(window.weights, window["top1_rows"]))
    if not rows:
        return None
    share = min(1.0, float(np.dot(window.weights, window["top1_matches"])) / rows)
    return weighted.proportion(share, window.size) if window.size >= MIN_EFFECTIVE_SIZE else Interval.unbounded(share)


def _clipped(found: Interval, bound: str) -> Interval:
    """Clip an interval at 0, because drift is never negative (decibels may be), and a share at 1."""
    if bound.startswith("sqnr_db"):
        return found
    highest = 1.0 if bound == "top1_agreement" else math.inf
    return Interval(*(min(max(0.0, value), highest) for value in found))
