"""Which requests are quick enough to run on a thread that must not wait, and the right to do so."""

from __future__ import annotations

import math
from collections.abc import Callable

# A run that takes less is over before another thread would have begun it: waking one costs some 50 µs where others are
# at work, and 200 µs where none is.
_QUICK_S = 1e-4
_RECENT = 0.1  # of the newest run, in what one is expected to take
_CLASSES = 64  # of sizes, one for each power of two: more than a message can have


class Quickness:
    """Whether the next run is expected to be quick, from what runs for messages of about its size took of their
    callers' threads: what is known of small requests says nothing of large ones.

    Of the time on the clock much is waiting for Python's lock, while other threads answer requests. There is no lock:
    an observation that is lost changes nothing.
    """

    def __init__(self) -> None:
        self._expected = [math.inf] * _CLASSES  # seconds, by the bits of a size; nothing is known yet

    def quick(self, nbytes: int) -> bool:
        return self._expected[nbytes.bit_length()] < _QUICK_S

    def observe(self, nbytes: int, seconds: float) -> None:
        """A run for a message of ``nbytes`` has taken so much of its thread's time."""
        size = nbytes.bit_length()
        known = self._expected[size]
        self._expected[size] = seconds if known == math.inf else known + _RECENT * (seconds - known)


class IdleClaim:
    """See :class:`service.request.Claim`: one of a batcher's idle runs, taken before there is a request for it.

    ``release`` gives it back to its batcher, and tells whose it is.
    """

    __slots__ = ("_held", "_release")

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._held = True

    def use(self, release: Callable[[], None]) -> bool:
        """Whether the claim is of the batcher with this ``release``, which from now on has to call it; once."""
        if not self._held or self._release != release:
            return False
        self._held = False
        return True

    def give_back(self) -> None:
        """See :meth:`service.request.Claim.give_back`."""
        if self._held:
            self._held = False
            self._release()
