"""Bounds how much the server holds at once. Further calls are rejected before they are read, so the client sees it.

A call acquires a place when its headers arrive, and releases it when gRPC has nothing left to do for it. A client that
does not read its response therefore keeps its place, and the bytes of its response stay counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from bf16kit.messages.errors import Overloaded, RequestError


class Shares:
    """Divides ``limit`` places among holders.

    While half of the places are free, every holder may take one. After that each holder may have an equal part. The
    last eighth is reserved for holders of very few places. Newcomers thus find room however many calls one client
    sends. Not thread-safe.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_use = 0
        self._by_holder: dict[str, int] = {}

    def acquire(self, holder: str) -> bool:
        """Acquire one more place for ``holder``. Return whether it may have one."""
        own = self._by_holder.get(holder, 0)
        if self.full or own >= self._fair_share(own):
            return False
        self._by_holder[holder] = own + 1
        self.in_use += 1
        return True

    @property
    def full(self) -> bool:
        return self.in_use >= self._limit

    def _fair_share(self, own: int) -> int:
        """Return how many places a holder that has ``own`` may have at present."""
        if 2 * self.in_use < self._limit:
            return self._limit
        if 8 * self.in_use < 7 * self._limit:
            return max(1, self._limit // (len(self._by_holder) + (own == 0)))
        return max(1, self._limit // 32)

    def release(self, holder: str) -> None:
        own = self._by_holder[holder] - 1
        self.in_use -= 1
        if own:
            self._by_holder[holder] = own
        else:
            del self._by_holder[holder]


class ByteBudget:
    """The bytes of requests and responses that all calls hold together, at most ``limit``.

    A call alone may exceed it.
    """

    def __init__(self, limit: int = 1 << 62) -> None:
        self.lock = threading.Lock()
        self._limit = limit
        self._in_use = 0

    @property
    def under_pressure(self) -> bool:
        return 2 * self._in_use >= self._limit

    def acquire(self, nbytes: int, own: int) -> None:
        """Reserve bytes for a call that already holds ``own``. Raises :class:`Overloaded`.

        The caller holds the lock.
        """
        if self._in_use > own and self._in_use + nbytes > self._limit:
            raise Overloaded(
                f"requests and responses hold {self._in_use} bytes, the limit is {self._limit}; try again later",
                "bytes",
            )
        self._in_use += nbytes

    def release(self, nbytes: int) -> None:
        """Release bytes. The caller holds the lock."""
        self._in_use -= nbytes


class Place:
    """One call's place in an :class:`Admission`, with the bytes that it holds. :meth:`release` releases all, once."""

    __slots__ = ("_admission", "_budget", "_released", "client", "nbytes")

    def __init__(self, admission: Admission, client: str) -> None:
        self.client = client
        self.nbytes = 0
        self._admission = admission
        self._budget = admission.budget
        self._released = False

    def add_bytes(self, nbytes: int) -> None:
        """Reserve bytes. Raises :class:`Overloaded` if all calls together hold too much.

        No effect after :meth:`release`.
        """
        with self._budget.lock:
            if not self._released:
                self._budget.acquire(nbytes, self.nbytes)
                self.nbytes += nbytes

    def remove_bytes(self, nbytes: int) -> None:
        with self._budget.lock:
            if not self._released:
                self._budget.release(nbytes)
                self.nbytes -= nbytes

    def release(self) -> None:
        with self._budget.lock:
            if self._released:
                return
            self._released = True
            self._budget.release(self.nbytes)
        self._admission.release(self.client)


class CallBytes:
    """The bytes of one request and its response, as part of what the call's place holds."""

    __slots__ = ("_largest_total", "_nbytes", "_place")

    def __init__(self, place: Place) -> None:
        self._place = place
        self._nbytes = self._largest_total = 0

    def reserve(self, nbytes: int) -> None:
        """Reserve ``nbytes`` for the request. Repeated calls count the largest number.

        Raises as :meth:`Place.add_bytes`.
        """
        if nbytes > self._largest_total:
            self._add(nbytes - self._largest_total)
            self._largest_total = nbytes

    def reserve_more(self, nbytes: int) -> None:
        """Reserve ``nbytes`` in addition: for a response that the client has yet to read, or for data in shared memory.

        Raises as :meth:`Place.add_bytes`.
        """
        self._add(nbytes)

    def release(self) -> None:
        """Release all bytes: the client has the response."""
        self._place.remove_bytes(self._nbytes)
        self._nbytes = 0

    def _add(self, nbytes: int) -> None:
        self._place.add_bytes(nbytes)
        self._nbytes += nbytes


class Admission:
    """Admits at most ``limit`` calls at a time, whose bytes count against ``budget``."""

    def __init__(
        self,
        limit: int,
        what: str,
        *,
        reason: str = "in_flight",
        budget: ByteBudget | None = None,
    ) -> None:
        self.limit = limit
        self.budget = budget or ByteBudget()
        self._lock = threading.Lock()
        self._what = what
        self._reason = reason
        self._shares = Shares(limit)
        self._closed: Callable[[], RequestError] | None = None
        self._empty = threading.Condition(self._lock)

    @property
    def under_pressure(self) -> bool:
        """Whether half of the places or bytes are taken. Slow clients then get less time."""
        return 2 * self._shares.in_use >= self.limit or self.budget.under_pressure

    def admit(self, client: str) -> Place:
        """Return a place for a call of ``client``.

        Raises :class:`Overloaded` if it gets none, or :meth:`close`'s error.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed()
            if not self._shares.acquire(client):
                limit = f"{self.limit} {self._what} is the limit of this server"
                if self._shares.full:
                    raise Overloaded(f"{limit}; try again later", self._reason)
                raise Overloaded(f"{limit}, and this connection has its share; try again later", "connection_share")
        return Place(self, client)

    def release(self, client: str) -> None:
        """Free a place."""
        with self._lock:
            self._shares.release(client)
            if not self._shares.in_use:
                self._empty.notify_all()

    def close(self, error: Callable[[], RequestError]) -> None:
        """Reject every new call with this error from now on."""
        with self._lock:
            self._closed = error

    def wait_empty(self, until: float) -> bool:
        """Wait until no call is inside. Return False if one still is at ``until`` (:func:`time.monotonic` seconds)."""
        with self._lock:
            return self._empty.wait_for(lambda: not self._shares.in_use, max(0.0, until - time.monotonic()))


class FairShares:
    """A thread-safe :class:`Shares` that raises."""

    def __init__(self, limit: int, what: str, reason: str) -> None:
        self._shares = Shares(limit)
        self._limit = limit
        self._what = what
        self._reason = reason
        self._lock = threading.Lock()

    def acquire(self, holder: str) -> None:
        """Acquire a place. Raises :class:`Overloaded` if ``holder`` already has its share."""
        with self._lock:
            if not self._shares.acquire(holder):
                raise Overloaded(
                    f"{self._what} {holder!r} has its share of the {self._limit} requests in flight; try again later",
                    self._reason,
                )

    def release(self, holder: str) -> None:
        with self._lock:
            self._shares.release(holder)
