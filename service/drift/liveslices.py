"""The worst slice of an output in live traffic: sums per slice over recent requests, in bounded memory."""

from __future__ import annotations

import math

from bf16kit.drift.metrics import OutputDrift, compare
from bf16kit.drift.slices import Scales, SliceError, SliceSums, Variation, limits_of, worst_slices
from bf16kit.numerics.tensors import TensorSpec
from service.contract import Array
from service.drift.recent import HALF_LIFE, MIN_EFFECTIVE_SIZE, Estimate
from service.drift.weighted import Z_ALWAYS, Z

_EVERY = 16  # requests between two decays of the sums
_JUDGED = 8  # requests between two searches for the worst slice, once there are some
_DECAY = 2.0 ** (-_EVERY / HALF_LIFE)
# Elements of a row that is kept to tell how the next one differs: half a megabyte. Larger rows vary within a
# request of several rows alone, so their slices are mostly judged against the variation at conversion.
_LARGEST_ROW = 1 << 16
# A mean square over n requests has a relative standard error of √(2/n). The slice error is the root of a ratio of two,
# so the logarithm's is 1/√n. It is the largest of up to thousands of slices: the interval's lower end takes the 4.5
# standard errors of Z_ALWAYS, which chance exceeds in less than one of a hundred thousand.
# Times its known variation that a slice's error counts in one request. A destroyed slice has 1.4. A single request of n
# gives 4/√n, and the interval of that begins below the default bound for every n.
_MOST = 4.0


class LiveSlices:
    """Recent slice errors of one output. The requests measured count alike, whatever their sampling probability.

    A slice is judged against its variation in recent requests, or in the conversion's samples (``known``) if that was
    larger: clients that send nearly the same input again and again show no variation, and that is no fault of bf16. A
    slice that the conversion did not judge is not judged. No single request blinds the judge or raises the alarm: what
    one adds to the variation and to the errors is limited.
    """

    def __init__(self, spec: TensorSpec, batch_axis: int | None, known: Scales | None = None) -> None:
        self._spec, self._batch_axis = spec, batch_axis
        self._limits = limits_of(known, _MOST)
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
            self._noise.scale(_DECAY)
            self._variation.scale(_DECAY)
        self._noise.merge(found.noise, self._limits)
        if self._requests < _EVERY or self._requests % _JUDGED == 0:
            self._worst = next(iter(worst_slices(self._noise, self._variation.scales())), None)

    def worst(self) -> SliceError | None:
        """Return the worst slice of recent requests, up to :data:`_JUDGED` ago; None while none can be judged."""
        return self._worst


def estimate(ratio: float, effective: float) -> Estimate:
    """Return the slice error's ``ratio`` to its bound with an interval for ``effective`` samples."""
    if effective < MIN_EFFECTIVE_SIZE:
        least = -math.inf if ratio else 0.0
        return Estimate("slice_error", ratio, least, math.inf, least)
    spread = 1 / math.sqrt(effective)
    low = ratio * math.exp(-Z_ALWAYS * spread)
    return Estimate("slice_error", ratio, low, ratio * math.exp(Z * spread), low)
