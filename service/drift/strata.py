"""Classifies requests into kinds, estimates how often each comes, and decides with what probability it is measured.

A kind, or *stratum*, is a class of input sizes and a class of latency. Half of the measurements are allocated by how
often a kind comes, half equally (:func:`allocated`). Rare kinds are thus seen soon, and a frequent kind weighs at most
twice what it would in a plain sample.

A request's probability depends on the requests before it and on itself, never on the draw. Weights of 1 ÷ probability
are therefore unbiased however poor the estimates are; these only decide how much is measured (Horvitz and Thompson
1952; docs/decisions/0055).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from bf16kit.numerics.tensors import TensorSpec
from service.contract import Array
from service.drift.policy import ShadowPolicy

MAX_SIZES = 32  # classes of input sizes; any further sizes share one more class
FAST, SLOW = 0.05, 0.95  # latency quantiles, per class of sizes, that separate fast and slow requests from the rest
_STEP = 0.05  # relative step of the running quantiles
_MEMORY_S = 60.0  # a request of this age counts 1/e
# Initial estimate of a new kind: its weight, in seconds, and its rate, in requests per second.
_INITIAL_S, _INITIAL_RATE = 3.0, 1 / 30
_WINDOW_S = 1.0  # interval between estimates of rates and probabilities; shorter in a burst
_TINY_S = 1e-6  # lowest start of a quantile: one that starts at 0 would stay there
_SHORTEST_S = 0.25  # shortest time over which a rate is estimated
# Requests after which to look for a burst, in addition to half of those expected in a window. While all requests are
# measured, these must leave tokens (sampling.BURST) for the next ones, which are chosen rarely and weigh more.
_CHECK_AFTER = 4
# Standard deviations, of a count of one request or more, from which to suspect a burst, and to believe another rate.
_SUSPECTED, _BELIEVED = 3.0, 5.0
_SIGNIFICANT_COUNT = 16  # requests expected, of which half are not chance
_MIN_RATE = 1e-6  # requests per second: a class of sizes with a lower rate is forgotten
_HEADROOM = 0.8  # target as a share of max_per_second: arrivals at random have bursts
_MIN_TARGET_SHARE = 1 / 16  # lowest share of that target, even if samples find no room

Sizes = tuple[int, ...]
_OTHER: Sizes = (-1,)  # all sizes beyond MOST_SIZES classes


class Stratum:
    """One kind of requests: its rate, per second, and the probability that one of them is measured.

    ``arrivals`` counts requests in the current window. Threads increment it without a lock and may lose a count: it is
    an estimate.
    """

    __slots__ = ("_requests", "_seconds", "arrivals", "probability", "rate")

    def __init__(self) -> None:
        self.arrivals = 0
        self.probability = 0.0
        self._seconds = _INITIAL_S  # observed seconds, with exponential decay
        self._requests = _INITIAL_RATE * _INITIAL_S  # requests in them
        self.rate = _INITIAL_RATE

    def current_rate(self, seconds: float, surge: float) -> float:
        """Return the current rate, ``seconds`` into the window, while all requests together come ``surge`` times as
        often as expected.

        It is the known rate, unless this window looks like a burst.
        """
        known = self.rate * surge
        return self.arrivals / seconds if is_burst(self.arrivals, known * seconds) else known

    def end_window(self, seconds: float, surge: float) -> None:
        """End the window after ``seconds``.

        A rate of half or twice the expected one replaces it at once; smaller differences are noise and are averaged.
        """
        expected = self.rate * surge * seconds
        if is_significant(self.arrivals, expected):
            self._seconds, self._requests = seconds, max(1.0, self.arrivals)
        else:
            decay = math.exp(-seconds / _MEMORY_S)
            self._seconds = self._seconds * decay + seconds
            self._requests = self._requests * surge * decay + self.arrivals
        self.rate = max(self._requests / self._seconds, _MIN_RATE / 10)
        self.arrivals = 0


def is_significant(arrivals: int, expected: float) -> bool:
    """Whether ``arrivals`` differs from ``expected`` by more than chance, and by a factor of two."""
    fewer = expected >= _SIGNIFICANT_COUNT and arrivals < expected / 2
    return fewer or _exceeds(arrivals, expected, _BELIEVED)


def is_burst(arrivals: int, expected: float) -> bool:
    """Whether there may be a burst. It need not be certain: the known rate stays what it is."""
    return _exceeds(arrivals, expected, _SUSPECTED)


def _exceeds(arrivals: int, expected: float, deviations: float) -> bool:
    return arrivals > expected + max(expected, deviations * math.sqrt(max(expected, 1.0)))


class _SizeClass:
    """Requests of one class of sizes, in three strata by latency. ``low`` and ``high`` are the latency quantiles, in
    seconds.

    They are updated by stochastic approximation (Robbins and Monro 1951), in steps relative to their value.
    """

    __slots__ = ("high", "low", "strata")

    def __init__(self, seconds: float) -> None:
        self.low = self.high = max(seconds, _TINY_S)
        self.strata = (Stratum(), Stratum(), Stratum())

    def classify(self, seconds: float) -> Stratum:
        """Return the stratum of a request of this latency, by earlier ones' quantiles, and update the quantiles."""
        low, high = self.low, self.high
        fast, slow = seconds < low, seconds > high
        self.low = low * (_DOWN_LOW if fast else _UP_LOW)
        self.high = high * (_UP_HIGH if slow else _DOWN_HIGH)
        return self.strata[0 if fast else 2 if slow else 1]


_DOWN_LOW, _UP_LOW = 1 - _STEP * (1 - FAST), 1 + _STEP * FAST
_UP_HIGH, _DOWN_HIGH = 1 + _STEP * SLOW, 1 - _STEP * (1 - SLOW)


class Strata:
    """Gives the probability with which each request is measured. For any thread."""

    def __init__(
        self, policy: ShadowPolicy, inputs: Sequence[TensorSpec], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share = policy.rate
        self._floor = policy.min_per_second
        self._max_rate = _HEADROOM * policy.max_per_second
        self._dims = free_dimensions(inputs)
        self._clock = clock
        self._size_classes: dict[Sizes, _SizeClass] = {}
        self._lock = threading.Lock()
        self._window_start = clock()
        self._window_end = self._window_start + _WINDOW_S
        self._until_check = _CHECK_AFTER  # requests until the next look for a burst
        self._target_share = 1.0
        self._sample_dropped = False

    def probability(self, feeds: Mapping[str, Array], arrived: float) -> float:
        """Return the probability, in (0, 1], for a request that is answered now.

        ``arrived`` is when it arrived, in the clock's seconds.
        """
        now = self._clock()
        key = tuple([feeds[name].shape[axis].bit_length() for name, axis in self._dims])
        size_class = self._size_classes.get(key)
        if size_class is None:
            size_class = self._size_class_of(key, now - arrived)
        stratum = size_class.classify(now - arrived)
        stratum.arrivals += 1
        self._until_check -= 1
        if self._until_check <= 0 or now >= self._window_end or not stratum.probability:
            self._update(now)
        return stratum.probability or self._share

    def note_dropped_sample(self) -> None:
        """Note that a chosen sample found no room, so that fewer are chosen for a while."""
        self._sample_dropped = True

    def _size_class_of(self, key: Sizes, seconds: float) -> _SizeClass:
        with self._lock:
            if key not in self._size_classes and len(self._size_classes) >= MAX_SIZES:
                key = _OTHER
            return self._size_classes.setdefault(key, _SizeClass(seconds))

    def _update(self, now: float) -> None:
        """Compute new probabilities, and end the window if it is over.

        One thread at a time; others skip it instead of waiting.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            strata = [stratum for each in self._size_classes.values() for stratum in each.strata]
            seconds = now - self._window_start
            if seconds >= _WINDOW_S:
                self._end_window(strata, seconds)
                self._window_start, self._window_end, seconds = now, now + _WINDOW_S, 0.0
            seconds = max(seconds, _SHORTEST_S)
            surge = _surge(strata, seconds, is_burst)
            rates = [stratum.current_rate(seconds, surge) for stratum in strata]
            total = sum(rates)
            wanted = max(self._share * total, self._floor)
            targets = allocated(rates, min(wanted, self._max_rate * self._target_share))
            for stratum, rate, part in zip(strata, rates, targets, strict=True):
                stratum.probability = min(1.0, part / rate)
            self._until_check = _CHECK_AFTER + round(total * _WINDOW_S / 2)
        finally:
            self._lock.release()

    def _end_window(self, strata: Sequence[Stratum], seconds: float) -> None:
        surge = _surge(strata, seconds, is_significant)
        for stratum in strata:
            stratum.end_window(seconds, surge)
        idle = [key for key, each in self._size_classes.items() if all(one.rate < _MIN_RATE for one in each.strata)]
        for key in idle:
            del self._size_classes[key]
        if self._sample_dropped:
            self._target_share = max(self._target_share / 2, _MIN_TARGET_SHARE)
        else:
            self._target_share = min(1.0, self._target_share * 1.1)
        self._sample_dropped = False


def _surge(strata: Sequence[Stratum], seconds: float, differs: Callable[[int, float], bool]) -> float:
    """Return requests observed ÷ expected in ``seconds``, over all strata; 1 unless the one ``differs``."""
    arrivals, expected = sum(stratum.arrivals for stratum in strata), sum(stratum.rate for stratum in strata) * seconds
    return max(1, arrivals) / expected if differs(arrivals, expected) else 1.0


def free_dimensions(inputs: Sequence[TensorSpec]) -> tuple[tuple[str, int], ...]:
    """Return where to read the size of each free dimension: an input that has it, and the axis."""
    found: dict[str, tuple[str, int]] = {}
    for spec in inputs:
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str):
                found.setdefault(dim, (spec.name, axis))
    return tuple(found.values())


def allocated(rates: Sequence[float], budget: float) -> list[float]:
    """Allocate ``budget`` measurements per second to kinds that come ``rates`` times a second.

    Half is allocated by rate and half equally. No kind gets more than its rate; the rest goes to the others. Each kind
    gets at least half of its share in a plain sample.
    """
    total = sum(rates)
    if budget >= total:
        return list(rates)
    plain = budget / 2 / total
    parts, left = [0.0] * len(rates), budget / 2
    by_room = sorted(range(len(rates)), key=rates.__getitem__)  # the room left in a kind is proportional to its rate
    for done, index in enumerate(by_room):
        extra = min(rates[index] * (1 - plain), left / (len(rates) - done))
        parts[index] = rates[index] * plain + extra
        left -= extra
    return parts
