"""How much the server holds at once: more is refused before it is read, where the client sees it.

A place is taken when the headers of a call arrive, and given back when gRPC has nothing left to do for the call: a
client that does not read its response keeps its place, and with it what its response takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from bf16kit.errors import Overloaded, RequestError
from service.transport.limit import AdaptiveLimit


class Shares:
    """Who holds how many of ``limit`` places. While half of them are free, whoever comes takes one.

    After that each holder may have an equal part, and the last eighth is for those who hold hardly any: so there is
    room for others to come, however many one of them sends. ``limit`` may change at any time. Not thread-safe.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._held: dict[str, int] = {}

    def take(self, holder: str) -> bool:
        """Whether ``holder`` may have one place more; it then has it."""
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
        """How many places a holder of ``own`` may have as things are."""
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
    """Bytes of requests and answers that all calls hold together: at most ``limit``, but for what one holds alone."""

    def __init__(self, limit: int = 1 << 62) -> None:
        self.lock = threading.Lock()
        self._limit = limit
        self._taken = 0

    @property
    def crowded(self) -> bool:
        return 2 * self._taken >= self._limit

    def take(self, nbytes: int, own: int) -> None:
        """More bytes for a call that holds ``own``. Raises :class:`Overloaded`. Called with the lock held."""
        if self._taken > own and self._taken + nbytes > self._limit:
            raise Overloaded(
                f"requests and answers of {self._taken} bytes are held, the limit is {self._limit}; try again later",
                "bytes",
            )
        self._taken += nbytes

    def give(self, nbytes: int) -> None:
        """Called with the lock held."""
        self._taken -= nbytes


class Place:
    """One call's place behind a :class:`Door`, with the bytes that it holds; :meth:`leave` gives all back, once."""

    __slots__ = ("_budget", "_door", "_left", "client", "nbytes")

    def __init__(self, door: Door, client: str) -> None:
        self.client = client
        self.nbytes = 0
        self._door = door
        self._budget = door.budget
        self._left = False

    def add(self, nbytes: int) -> None:
        """Raises :class:`Overloaded` when all calls together hold too much. What has left holds nothing more."""
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
    """The bytes of one request and of its answer, of those that the call's place holds."""

    __slots__ = ("_largest", "_nbytes", "_place")

    def __init__(self, place: Place) -> None:
        self._place = place
        self._nbytes = self._largest = 0

    def hold(self, nbytes: int) -> None:
        """The request takes ``nbytes``; said again, the largest number counts. Raises as :meth:`Place.add`."""
        if nbytes > self._largest:
            self._add(nbytes - self._largest)
            self._largest = nbytes

    def hold_more(self, nbytes: int) -> None:
        """So do its answer, which the client has yet to take, and what it has in shared memory. Raises as
        :meth:`Place.add`."""
        self._add(nbytes)

    def release(self) -> None:
        """The client has the answer."""
        self._place.remove(self._nbytes)
        self._nbytes = 0

    def _add(self, nbytes: int) -> None:
        self._place.add(nbytes)
        self._nbytes += nbytes


class Door:
    """Counts the calls inside, at most ``limit``; what they hold is of ``budget``. With ``adaptive``, fewer calls for a
    time.
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
        """Whether half of the places or bytes are taken: the moment to be strict with those who keep them waiting."""
        return 2 * self._shares.taken >= self.limit or self.budget.crowded

    def enter(self, client: str) -> Place:
        """A place for a call of ``client``. Raises :class:`Overloaded` when there is none for it, or what :meth:`close`
        was told to."""
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
        """A place is free again."""
        with self._lock:
            self._shares.give(client)
            if not self._shares.taken:
                self._empty.notify_all()

    def close(self, error: Callable[[], RequestError]) -> None:
        """From now on whoever comes is told this error."""
        with self._lock:
            self._closed = error

    def wait_empty(self, until: float) -> bool:
        """Whether everybody had left by ``until`` (:func:`time.monotonic` seconds)."""
        with self._lock:
            return self._empty.wait_for(lambda: not self._shares.taken, max(0.0, until - time.monotonic()))


class FairShares:
    """:class:`Shares` for those who take and give on many threads."""

    def __init__(self, limit: int, what: str, reason: str) -> None:
        self._shares = Shares(limit)
        self._limit = limit
        self._what = what
        self._reason = reason
        self._lock = threading.Lock()

    def take(self, holder: str) -> None:
        """Raises :class:`Overloaded` when ``holder`` has its share already."""
        with self._lock:
            if not self._shares.take(holder):
                raise Overloaded(
                    f"{self._what} {holder!r} has its share of the {self._limit} requests in flight; try again later",
                    self._reason,
                )

    def give(self, holder: str) -> None:
        with self._lock:
            self._shares.give(holder)
