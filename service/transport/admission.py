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


class Place:
    """One call's place behind a :class:`Door`, with what it holds there; :meth:`leave` gives all of it back, once."""

    __slots__ = ("_client", "_door", "_largest", "_left", "_nbytes")

    def __init__(self, door: Door, client: str) -> None:
        self._door = door
        self._client = client
        self._nbytes = self._largest = 0
        self._left = False

    def hold(self, nbytes: int) -> None:
        """Count a request of ``nbytes``; of a call's, the largest counts. Raises :class:`Overloaded` when those of all
        calls are too many."""
        with self._door.lock:
            if nbytes > self._largest:
                self._add(nbytes - self._largest)
                self._largest = nbytes

    def hold_answer(self, nbytes: int) -> None:
        """Count the answer, which the client has yet to take. Raises as :meth:`hold`."""
        with self._door.lock:
            self._add(nbytes)

    def _add(self, nbytes: int) -> None:
        if not self._left:
            self._door.add(nbytes, self._nbytes)
            self._nbytes += nbytes

    def leave(self) -> None:
        with self._door.lock:
            if self._left:
                return
            self._left = True
            self._door.remove(self._client, self._nbytes)


class Door:
    """Counts the calls inside, at most ``limit``, and bytes of their requests and answers, at most ``max_bytes``.

    With ``adaptive``, fewer calls for a time.
    """

    def __init__(
        self,
        limit: int,
        what: str,
        *,
        reason: str = "in_flight",
        max_bytes: int = 1 << 62,
        adaptive: AdaptiveLimit | None = None,
    ) -> None:
        self.limit = limit
        self._adaptive = adaptive
        self.lock = threading.Lock()
        self._what = what
        self._reason = reason
        self._shares = Shares(limit)
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._closed: Callable[[], RequestError] | None = None
        self._empty = threading.Condition(self.lock)

    @property
    def crowded(self) -> bool:
        """Whether half of the places or bytes are taken: the moment to be strict with those who keep them waiting."""
        return 2 * self._shares.taken >= self.limit or 2 * self._nbytes >= self._max_bytes

    def enter(self, client: str) -> Place:
        """A place for a call of ``client``. Raises :class:`Overloaded` when there is none for it, or what :meth:`close`
        was told to."""
        with self.lock:
            if self._closed is not None:
                raise self._closed()
            if self._adaptive is not None:
                self._shares.limit = self._adaptive.now
            if not self._shares.take(client):
                if self._adaptive is not None:
                    self._adaptive.refused()
                limit = f"{self._shares.limit} {self._what} is the limit of this server"
                if self._shares.limit < self.limit:
                    limit += " while models refuse most requests"
                if self._shares.full:
                    raise Overloaded(f"{limit}; try again later", self._reason)
                raise Overloaded(f"{limit}, and this connection has its share; try again later", "connection_share")
        return Place(self, client)

    def add(self, nbytes: int, own: int) -> None:
        """More bytes for a place that holds ``own``: what one holds alone has no bound. Called with the lock held."""
        if self._nbytes > own and self._nbytes + nbytes > self._max_bytes:
            raise Overloaded(
                f"requests and answers of {self._nbytes} bytes are held, the limit is {self._max_bytes}; try again"
                " later",
                "bytes",
            )
        self._nbytes += nbytes

    def remove(self, client: str, nbytes: int) -> None:
        """A place, and what it held, are free again. Called with the lock held."""
        self._shares.give(client)
        self._nbytes -= nbytes
        if not self._shares.taken:
            self._empty.notify_all()

    def close(self, error: Callable[[], RequestError]) -> None:
        """From now on whoever comes is told this error."""
        with self.lock:
            self._closed = error

    def wait_empty(self, until: float) -> bool:
        """Whether everybody had left by ``until`` (:func:`time.monotonic` seconds)."""
        with self.lock:
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
