"""Claims: the right to run a quick request on a thread that must not wait."""

from __future__ import annotations

import math
from collections.abc import Callable

# A shorter run is over before another thread would have begun it: waking a thread takes some 50 µs if others are busy,
# and 200 µs if none is.
_QUICK_S = 1e-4
_RECENT = 0.1  # weight of the newest run in the moving average
_CLASSES = 64  # size classes, one for each power of two: more than messages can have


class RunTimePredictor:
    """Predicts whether the next run is quick, from the thread time of past runs, by the size of their messages.

    Sizes are kept apart because small requests say nothing about large ones. Thread time is used because much of the
    elapsed time is waiting for Python's lock while other threads answer requests. There is no lock: a lost observation
    changes nothing.
    """

    def __init__(self) -> None:
        self._expected = [math.inf] * _CLASSES  # seconds, by the bit length of the size; inf: nothing is known yet

    def is_quick(self, nbytes: int) -> bool:
        return self._expected[nbytes.bit_length()] < _QUICK_S

    def observe(self, nbytes: int, seconds: float) -> None:
        """Record a run for a message of ``nbytes`` that took ``seconds`` of its thread's CPU time."""
        size = nbytes.bit_length()
        known = self._expected[size]
        self._expected[size] = seconds if known == math.inf else known + _RECENT * (seconds - known)


class IdleClaim:
    """See :class:`service.request.Claim`: one idle run of a batcher, reserved before the request is known.

    ``release`` returns the run to its batcher, and identifies that batcher.
    """

    __slots__ = ("_release", "_unused")

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._unused = True

    def use(self, release: Callable[[], None]) -> bool:
        """Use the claim, once, if it belongs to the batcher with this ``release``. Returns whether it did.

        After True, the caller must call ``release`` when the run is over.
        """
        if not self._unused or self._release != release:
            return False
        self._unused = False
        return True

    def release(self) -> None:
        """See :meth:`service.request.Claim.release`."""
        if self._unused:
            self._unused = False
            self._release()
