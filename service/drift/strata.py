"""Which kinds of requests come, how often, and with what probability one of each kind is to be measured.

A kind, or *stratum*, is a class of input sizes and a class of latency. Half of what may be measured goes to kinds by
how often they come, half to all alike (:func:`allocated`): what is rare is seen soon, and what is frequent weighs at
most twice what it would in a plain sample. Each request's probability follows from what came before it and from itself,
never from the draw: weights of 1 ÷ probability are free of bias whatever the estimates are worth, which decide only how
much is measured (Horvitz and Thompson 1952; docs/decisions/0055).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from bf16kit.tensors import TensorSpec
from service.contract import Array
from service.drift.policy import ShadowPolicy

MOST_SIZES = 32  # classes of input sizes; what comes beyond them shares one more
FAST, SLOW = 0.05, 0.95  # the quantiles of latency, within a class of sizes, that part its ends from its middle
_STEP = 0.05  # of the running quantiles, relative
_MEMORY_S = 60.0  # what came so long ago counts 1/e
_YOUNG_S, _YOUNG_RATE = 3.0, 1 / 30  # what a new kind is taken for: so many per second, and for how long
_WINDOW_S = 1.0  # how often rates, and with them probabilities, are estimated anew; sooner in a burst
_TINY_S = 1e-6  # a quantile starts at no less: one of 0 would stay there
_SHORTEST_S = 0.25  # what came within less is no rate yet
_SOON = 32  # requests after which, and as many as half a window is expected to bring, a burst is looked at
_TELLING = 16  # requests, come or expected, of which twice or half as many are no accident
_GONE = 1e-6  # requests per second: a class of sizes that comes no more often is forgotten
_HEADROOM = 0.8  # of max_per_second is aimed at, because chance has bursts
_LEAST_PACE = 1 / 16  # so much of it is still tried where nothing has room

Sizes = tuple[int, ...]
_OTHER: Sizes = (-1,)  # what is beyond MOST_SIZES


class Stratum:
    """One kind of requests: how often it comes, per second, and the probability that one of it is measured.

    ``came`` counts the window that runs. Threads add to it without a lock, and may lose one now and then: it is an
    estimate.
    """

    __slots__ = ("_seconds", "_seen", "came", "probability", "rate")

    def __init__(self) -> None:
        self.came = 0
        self.probability = 0.0
        self._seconds = _YOUNG_S  # behind us, fading
        self._seen = _YOUNG_RATE * _YOUNG_S  # requests in them
        self.rate = _YOUNG_RATE

    def pace(self, seconds: float, surge: float) -> float:
        """How often it comes, ``seconds`` into the window, while all requests together come ``surge`` times as often
        as was expected: what is known, or what the window shows already."""
        known, recent = self.rate * surge, self.came / max(seconds, _SHORTEST_S)
        return recent if self.came >= _TELLING and recent > 2 * known else known

    def roll(self, seconds: float, surge: float) -> None:
        """The window ends after ``seconds``. Half or twice what was expected is believed at once; anything else is
        noise, and averaged."""
        expected = self.rate * surge * seconds
        if tells(self.came, expected):
            self._seconds, self._seen = seconds, max(1.0, self.came)
        else:
            kept = math.exp(-seconds / _MEMORY_S)
            self._seconds = self._seconds * kept + seconds
            self._seen = self._seen * surge * kept + self.came
        self.rate = max(self._seen / self._seconds, _GONE / 10)
        self.came = 0


def tells(came: int, expected: float) -> bool:
    """Whether so many requests are too many or too few to be an accident."""
    return (came >= _TELLING and came > 2 * expected) or (expected >= _TELLING and came < expected / 2)


class _Sizes:
    """Requests of one class of sizes, in three strata by latency; ``low`` and ``high`` are the quantiles, in seconds.

    They run by stochastic approximation (Robbins and Monro 1951) in steps relative to themselves.
    """

    __slots__ = ("high", "low", "strata")

    def __init__(self, seconds: float) -> None:
        self.low = self.high = max(seconds, _TINY_S)
        self.strata = (Stratum(), Stratum(), Stratum())

    def place(self, seconds: float) -> Stratum:
        """Where a request of this latency belongs, by those before it."""
        low, high = self.low, self.high
        fast, slow = seconds < low, seconds > high
        self.low = low * (_DOWN_LOW if fast else _UP_LOW)
        self.high = high * (_UP_HIGH if slow else _DOWN_HIGH)
        return self.strata[0 if fast else 2 if slow else 1]


_DOWN_LOW, _UP_LOW = 1 - _STEP * (1 - FAST), 1 + _STEP * FAST
_UP_HIGH, _DOWN_HIGH = 1 + _STEP * SLOW, 1 - _STEP * (1 - SLOW)


class Strata:
    """What probability each request is measured with. Any thread may ask."""

    def __init__(
        self, policy: ShadowPolicy, inputs: Sequence[TensorSpec], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share = policy.rate
        self._most = _HEADROOM * policy.max_per_second
        self._dims = free_dimensions(inputs)
        self._clock = clock
        self._sizes: dict[Sizes, _Sizes] = {}
        self._lock = threading.Lock()
        self._began = clock()
        self._due = self._began + _WINDOW_S
        self._left = _SOON  # requests until a burst is looked at
        self._pace = 1.0
        self._crowded = False

    def probability(self, feeds: Mapping[str, Array], arrived: float) -> float:
        """In (0, 1], of a request that is answered now and came at ``arrived``, in the clock's seconds."""
        now = self._clock()
        key = tuple([feeds[name].shape[axis].bit_length() for name, axis in self._dims])
        sizes = self._sizes.get(key)
        if sizes is None:
            sizes = self._sizes_of(key, now - arrived)
        stratum = sizes.place(now - arrived)
        stratum.came += 1
        self._left -= 1
        if self._left <= 0 or now >= self._due or not stratum.probability:
            self._plan(now)
        return stratum.probability or self._share

    def crowd(self) -> None:
        """What was chosen found no room: choose less for a while."""
        self._crowded = True

    def _sizes_of(self, key: Sizes, seconds: float) -> _Sizes:
        with self._lock:
            if key not in self._sizes and len(self._sizes) >= MOST_SIZES:
                key = _OTHER
            return self._sizes.setdefault(key, _Sizes(seconds))

    def _plan(self, now: float) -> None:
        """New probabilities; rolls the window when it is over. One thread at a time, and no other waits for it."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            strata = [stratum for sizes in self._sizes.values() for stratum in sizes.strata]
            seconds = now - self._began
            if seconds >= _WINDOW_S:
                self._roll(strata, seconds)
                self._began, self._due, seconds = now, now + _WINDOW_S, 0.0
            surge = max(1.0, _surge(strata, max(seconds, _SHORTEST_S)))
            rates = [stratum.pace(seconds, surge) for stratum in strata]
            total = sum(rates)
            wanted = allocated(rates, min(self._share * total, self._most * self._pace))
            for stratum, rate, part in zip(strata, rates, wanted, strict=True):
                stratum.probability = min(1.0, part / rate)
            self._left = _SOON + round(total * _WINDOW_S / 2)
        finally:
            self._lock.release()

    def _roll(self, strata: Sequence[Stratum], seconds: float) -> None:
        surge = _surge(strata, seconds)
        for stratum in strata:
            stratum.roll(seconds, surge)
        gone = [key for key, sizes in self._sizes.items() if all(stratum.rate < _GONE for stratum in sizes.strata)]
        for key in gone:
            del self._sizes[key]
        self._pace = max(self._pace / 2, _LEAST_PACE) if self._crowded else min(1.0, self._pace * 1.1)
        self._crowded = False


def _surge(strata: Sequence[Stratum], seconds: float) -> float:
    """How many times as many requests as expected have come in ``seconds``; 1 where it may be chance."""
    came, expected = sum(stratum.came for stratum in strata), sum(stratum.rate for stratum in strata) * seconds
    return max(1, came) / expected if tells(came, expected) else 1.0


def free_dimensions(inputs: Sequence[TensorSpec]) -> tuple[tuple[str, int], ...]:
    """Where to read each free dimension's size: an input that has it, and the axis there."""
    found: dict[str, tuple[str, int]] = {}
    for spec in inputs:
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str):
                found.setdefault(dim, (spec.name, axis))
    return tuple(found.values())


def allocated(rates: Sequence[float], budget: float) -> list[float]:
    """Measurements per second for kinds that come ``rates`` times a second, ``budget`` in all.

    Half of it by rate, half to all alike, but to none more than comes; what one cannot use goes to the others. None has
    less than half of what a plain sample would give it.
    """
    total = sum(rates)
    if budget >= total:
        return list(rates)
    plain = budget / 2 / total
    parts, left = [0.0] * len(rates), budget / 2
    by_room = sorted(range(len(rates)), key=rates.__getitem__)  # room is in proportion to the rate
    for done, index in enumerate(by_room):
        extra = min(rates[index] * (1 - plain), left / (len(rates) - done))
        parts[index] = rates[index] * plain + extra
        left -= extra
    return parts
