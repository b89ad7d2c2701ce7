"""Recent drift of one output: its rows, and the worst of its slices.

Recent are the newest :data:`REQUESTS` measured requests, but none from before the last detected change. A request's
weight halves with every :data:`HALF_LIFE` requests after it. A row's weight is 1 ÷ its sampling probability, so the
estimate is for the drift of all answered rows.

At most :data:`PER_REQUEST` rows of one request are kept. Its rows are much alike and confidence is counted in requests,
so this leaves room for all recent requests, whatever their size. The kept rows include the worst of each metric, for
bounds on the worst row and on values that are not finite; each of these counts as one row. The others are evenly
spaced, because a client may have sorted its rows, and share the weight of all remaining rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bf16kit.drift.metrics import DISTRIBUTIONS, OutputDrift, SampleDrift, compare
from bf16kit.drift.slices import Scales, SliceError, SliceSums, Variation, limits_of, worst_slices
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.service.contract import Array
from bf16kit.service.drift.intervals import Values, effective_size

HALF_LIFE = 400  # measured requests
REQUESTS = 2048  # an older request would weigh less than a thirtieth
PER_REQUEST = 8  # rows; the default of shadow.max_rows
_ROWS = REQUESTS * PER_REQUEST  # the most of all recent requests
_DECAY = np.exp2(-np.arange(REQUESTS) / HALF_LIFE)  # the weight of a request by the number of requests after it
MIN_EFFECTIVE_SIZE = 8.0  # effective samples; below them no interval is given
_COLUMNS = (*DISTRIBUTIONS, "top1_matches", "top1_rows", "nonfinite")
_WORSE_SIGN = {
    "relative_l2": 1,
    "cosine_distance": 1,
    "max_abs": 1,
    "sqnr_db": -1,
    "nonfinite": 1,
}  # 1: larger is worse; -1: smaller is worse
_EVERY = 16  # requests between two decays of a slice's sums
_JUDGED = 8  # requests between two searches for the worst slice, once there are some
_SLICE_DECAY = 2.0 ** (-_EVERY / HALF_LIFE)
# Elements of a row that is kept to tell how the next one differs: half a megabyte. Larger rows vary within a
# request of several rows alone, so their slices are mostly judged against the variation at conversion.
_LARGEST_ROW = 1 << 16
# Times its known variation that a slice's error counts in one request. A destroyed slice has 1.4. A single request of n
# gives 4/√n, and the interval of that begins below the default bound for every n.
_MOST_OF_ONE = 4.0


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
        if kept.all():
            return self
        weights, clusters = self.weights[kept], self.clusters[kept]
        size = effective_size(weights, clusters)
        return Window(self.columns[:, kept], weights, clusters, self.clients[kept], size)


class RecentRows:
    """The recent rows of one output. The arrays have room for twice as many; when they are full, the recent ones move
    to the front."""

    def __init__(self) -> None:
        self._columns = np.zeros((len(_COLUMNS), 2 * _ROWS))
        self._weights = np.zeros(2 * _ROWS)
        self._requests = np.zeros(2 * _ROWS, np.int64)  # counted from 1
        self._clients = np.zeros(2 * _ROWS, np.int64)
        self._rows = self._request = self._since = 0

    def add(self, drifts: Sequence[SampleDrift], weight: float, client: str = "") -> None:
        """Add one request's rows, each of which stands for ``weight`` rows."""
        if self._rows + PER_REQUEST > 2 * _ROWS:
            self._move_to_front()
        self._request += 1
        values = np.array([[getattr(drift, name) for drift in drifts] for name in _COLUMNS], np.float64)
        kept, shares = _select_rows(values)
        count = values[_COLUMNS.index("nonfinite")]
        count[count.argmax()] += count.sum() - count[kept].sum()  # rows that are not kept still count
        at = slice(self._rows, self._rows + len(kept))
        self._columns[:, at] = values[:, kept]
        self._weights[at], self._requests[at] = weight * shares, self._request
        self._clients[at] = hash(client)
        self._rows += len(kept)

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
        at, oldest = self._recent()
        requests = self._requests[at]
        weights = self._weights[at] * _DECAY[self._request - requests]
        clusters = requests - oldest
        size = effective_size(weights, clusters)
        return Window(self._columns[:, at], weights, clusters, self._clients[at], size)

    def _recent(self) -> tuple[slice, int]:
        """Return where the recent rows are, and the first one's request."""
        oldest = max(1, self._since, self._request - REQUESTS + 1)
        return slice(int(np.searchsorted(self._requests[: self._rows], oldest)), self._rows), oldest

    def _move_to_front(self) -> None:
        at, _ = self._recent()
        self._rows = at.stop - at.start
        for array in (self._columns, self._weights, self._requests, self._clients):
            array[..., : self._rows] = array[..., at].copy()


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


class LiveSlices:
    """Recent slice errors of one output. The requests measured count alike, whatever their sampling probability.

    A slice is judged against its variation in recent requests, or in the conversion's samples (``known``) if that was
    larger: clients that send nearly the same input again and again show no variation, and that is no fault of bf16. A
    slice that the conversion did not judge is not judged. No single request blinds the judge or raises the alarm: what
    one adds to the variation and to the errors is limited.
    """

    def __init__(self, spec: TensorSpec, batch_axis: int | None, known: Scales | None = None) -> None:
        self._spec, self._batch_axis = spec, batch_axis
        self._limits = limits_of(known, _MOST_OF_ONE)
        self._variation = Variation(spec, batch_axis, known, largest=_LARGEST_ROW)
        self.restart()

    def restart(self) -> None:
        """Forget the errors, because another precision answers now or drift has changed; the variation is kept."""
        self._noise = SliceSums(self._spec, self._batch_axis)
        self._requests = 0
        self._worst: SliceError | None = None

    def compare(self, reference: Array, candidate: Array) -> OutputDrift:
        """Measure one request's rows; the reference's count for the variation, the errors only once added."""
        return compare(reference, candidate, self._spec, self._batch_axis, variation=self._variation)

    def add(self, found: OutputDrift) -> None:
        """Add one request's errors."""
        if found.noise is None:
            return
        self._requests += 1
        if self._requests % _EVERY == 0:
            self._noise.scale(_SLICE_DECAY)
            self._variation.scale(_SLICE_DECAY)
        self._noise.merge(found.noise, self._limits)
        if self._requests < _EVERY or self._requests % _JUDGED == 0:
            self._worst = next(iter(worst_slices(self._noise, self._variation.scales())), None)

    def worst(self) -> SliceError | None:
        """Return the worst slice of recent requests, up to :data:`_JUDGED` ago; None while none can be judged."""
        return self._worst
