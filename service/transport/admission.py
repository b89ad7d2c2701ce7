"""Bounds how much the server holds at once. Further calls are rejected before they are read, so the client sees it.

A call takes a place when its headers arrive, and gives it back when gRPC has nothing left to do for it. A client that
does not read its response therefore keeps its place, and the bytes of its response stay counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from bf16kit.errors import Overloaded, RequestError
from service.transport.limit import AdaptiveLimit


class Shares:
    """Divides ``limit`` places among holders.

    While half of the places are free, every holder may take one. After that each holder may have an equal part. The
    last eighth is reserved for holders of very few places. Newcomers thus find room however many calls one client
    sends. ``limit`` may change at any time. Not thread-safe.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._held: dict[str, int] = {}

    def take(self, holder: str) -> bool:
        """Take one more place for ``holder``. Return whether it may have one."""
        own = self._held.get(holder, 0)
        if self.full or own >= self._part(own):
            return False
        self._held[holder] = own + 1
        self.taken += 1
        return True

    @property
    def full(self) -> bool:
        return self.taken >= self.limit

    def _part(self, own: int) -> int:
        """Return how many places a holder that has ``own`` may have at present."""
        if 2 * self.taken < self.limit:
            return self.limit
        if 8 * self.taken < 7 * self.limit:
            return max(1, self.limit // (len(self._held) + (own == 0)))
        return max(1, self.limit // 32)

    def give(self, holder: str) -> None:
        own = self._held[holder] - 1
        self.taken -= 1
        if own:
            self._held[holder] = own
        else:
            del self._held[holder]


class ByteBudget:
    """The bytes of requests and responses that all calls hold together, at most ``limit``.

    A call alone may exceed it.
    """

    def __init__(self, limit: int = 1 << 62) -> None:
        self.lock = threading.Lock()
        self._limit = limit
        self._taken = 0

    @property
    def crowded(self) -> bool:
        return 2 * self._taken >= self._limit

    def take(self, nbytes: int, own: int) -> None:
        """Take bytes for a call that already holds ``own``. Raises :class:`Overloaded`. The caller holds the lock."""
        if self._taken > own and self._taken + nbytes > self._limit:
            raise Overloaded(
                f"requests and responses hold {self._taken} bytes, the limit is {self._limit}; try again later",
                "bytes",
            )
        self._taken += nbytes

    def give(self, nbytes: int) -> None:
        """Give bytes back. The caller holds the lock."""
        self._taken -= nbytes


class Place:
    """One call's place behind a :class:`Door`, with the bytes that it holds. :meth:`leave` gives all back, once."""

    __slots__ = ("_budget", "_door", "_left", "client", "nbytes")

    def __init__(self, door: Door, client: str) -> None:
        self.client = client
        self.nbytes = 0
        self._door = door
        self._budget = door.budget
        self._left = False

    def add(self, nbytes: int) -> None:
        """Take bytes. Raises :class:`Overloaded` if all calls together hold too much. No effect after :meth:`leave`."""
        with self._budget.lock:
            if not self._left:
                self._budget.take(nbytes, self.nbytes)
                self.nbytes += nbytes

    def remove(self, nbytes: int) -> None:
        with self._budget.lock:
            if not self._left:
                self._budget.give(nbytes)
                self.nbytes -= nbytes

    def leave(self) -> None:
        with self._budget.lock:
            if self._left:
                return
            self._left = True
            self._budget.give(self.nbytes)
        self._door.leave(self.client)


class Held:
    """The bytes of one request and its response, as part of what the call's place holds."""

    __slots__ = ("_largest", "_nbytes", "_place")

    def __init__(self, place: Place) -> None:
        self._place = place
        self._nbytes = self._largest = 0

    def hold(self, nbytes: int) -> None:
        """Hold ``nbytes`` for the request. Repeated calls count the largest number. Raises as :meth:`Place.add`."""
        if nbytes > self._largest:
            self._add(nbytes - self._largest)
            self._largest = nbytes

    def hold_more(self, nbytes: int) -> None:
        """Hold ``nbytes`` in addition: for a response that the client has yet to read, or for data in shared memory.

        Raises as :meth:`Place.add`.
        """
        self._add(nbytes)

    def release(self) -> None:
        """Give all bytes back: the client has the response."""
        self._place.remove(self._nbytes)
        self._nbytes = 0

    def _add(self, nbytes: int) -> None:
        self._place.add(nbytes)
        self._nbytes += nbytes


class Door:
    """Admits at most ``limit`` calls at a time, whose bytes count against ``budget``.

    ``adaptive`` may lower the limit for a time.
    """

    def __init__(
        self,
        limit: int,
        what: str,
        *,
        reason: str = "in_flight",
        budget: ByteBudget | None = None,
        adaptive: AdaptiveLimit | None = None,
    ) -> None:
        self.limit = limit
        self.budget = budget or ByteBudget()
        self._adaptive = adaptive
        self._lock = threading.Lock()
        self._what = what
        self._reason = reason
        self._shares = Shares(limit)
        self._closed: Callable[[], RequestError] | None = None
        self._empty = threading.Condition(self._lock)

    @property
    def crowded(self) -> bool:
        """Whether half of the places or bytes are taken. Slow clients then get less time."""
        return 2 * self._shares.taken >= self.limit or self.budget.crowded

    def enter(self, client: str) -> Place:
        """Return a place for a call of ``client``.

        Raises :class:`Overloaded` if it gets none, or :meth:`close`'s error.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed()
            if self._adaptive is not None:
                self._shares.limit = self._adaptive.now
            if not self._shares.take(client):
                if self._adaptive is not None and self._shares.limit < self.limit:
                    self._adaptive.refused()
                limit = f"{self._shares.limit} {self._what} is the limit of this server"
                if self._shares.limit < self.limit:
                    limit += " while models refuse most requests"
                if self._shares.full:
                    raise Overloaded(f"{limit}; try again later", self._reason)
                raise Overloaded(f"{limit}, and this connection has its share; try again later", "connection_share")
        return Place(self, client)

    def leave(self, client: str) -> None:
        """Free a place."""
        with self._lock:
            self._shares.give(client)
            if not self._shares.taken:
                self._empty.notify_all()

    def close(self, error: Callable[[], RequestError]) -> None:
        """Reject every new call with this error from now on."""
        with self._lock:
            self._closed = error

    def wait_empty(self, until: float) -> bool:
        """Wait until no call is inside. Return False if one still is at ``until`` (:func:`time.monotonic` seconds)."""
        with self._lock:
            return self._empty.wait_for(lambda: not self._shares.taken, max(0.0, until - time.monotonic()))


class FairShares:
    """A thread-safe :class:`Shares` that raises."""

    def __init__(self, limit: int, what: str, reason: str) -> None:
        self._shares = Shares(limit)
        self._limit = limit
        self._what = what
        self._reason = reason
        self._lock = threading.Lock()

    def take(self, holder: str) -> None:
        """Take a place. Raises :class:`Overloaded` if ``holder`` already has its share."""
        with self._lock:
            if not self._shares.take(holder):
                raise Overloaded(
                    f"{self._what} {holder!r} has its share of the {self._limit} requests in flight; try again later",
                    self._reason,
                )

    def give(self, holder: str) -> None:
        with self._lock:
            self._shares.give(holder)
