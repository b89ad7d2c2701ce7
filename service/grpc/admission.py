"""Bounds how much the server holds at once. Further calls are rejected before they are read, so the client sees it.

A call gets a permit when its headers arrive, and releases it when gRPC has nothing left to do for it. A client that
does not read its response therefore keeps its permit, and the bytes of its response stay counted.
"""

from __future__ import annotations

import threading
import time

from bf16kit.messages.errors import Overloaded


class Shares:
    """Divides ``limit`` places among holders.

    While half of the places are free, every holder may take one. After that each holder may have an equal part. The
    last eighth is reserved for holders of very few places. Newcomers thus find room however many calls one client
    sends.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self._by_holder: dict[str, int] = {}
        self._empty = threading.Condition(threading.Lock())  # its lock guards both fields above

    def acquire(self, holder: str) -> bool:
        """Acquire one more place for ``holder``. Return whether it may have one."""
        with self._empty:
            own = self._by_holder.get(holder, 0)
            if self.full or own >= self._fair_share(own):
                return False
            self._by_holder[holder] = own + 1
            self.in_use += 1
            return True

    def release(self, holder: str) -> None:
        with self._empty:
            own = self._by_holder[holder] - 1
            self.in_use -= 1
            if own:
                self._by_holder[holder] = own
            else:
                del self._by_holder[holder]
            if not self.in_use:
                self._empty.notify_all()

    @property
    def full(self) -> bool:
        return self.in_use >= self.limit

    @property
    def half_full(self) -> bool:
        return 2 * self.in_use >= self.limit

    def wait_empty(self, until: float) -> bool:
        """Wait until nobody holds a place. Return False if one is still held at ``until`` (:func:`time.monotonic`)."""
        with self._empty:
            return self._empty.wait_for(lambda: not self.in_use, max(0.0, until - time.monotonic()))

    def _fair_share(self, own: int) -> int:
        """Return how many places a holder that has ``own`` may have at present."""
        if not self.half_full:
            return self.limit
        if 8 * self.in_use < 7 * self.limit:
            return max(1, self.limit // (len(self._by_holder) + (own == 0)))
        return max(1, self.limit // 32)


class ByteBudget:
    """The bytes of requests and responses that all calls hold together, at most ``limit``.

    A call alone may exceed it.
    """

    def __init__(self, limit: int = 1 << 62) -> None:
        self.lock = threading.Lock()  # guards the numbers of bytes, here and in permits
        self.limit = limit
        self.in_use = 0

    @property
    def half_full(self) -> bool:
        return 2 * self.in_use >= self.limit


class Permit:
    """The right of one call to be answered, with the bytes that it holds. :meth:`release` releases all, once."""

    __slots__ = ("_budget", "_released", "_shares", "client", "nbytes")

    def __init__(self, shares: Shares, budget: ByteBudget, client: str) -> None:
        """``client`` holds a place of ``shares``, which the permit releases."""
        self.client = client
        self.nbytes = 0
        self._shares = shares
        self._budget = budget
        self._released = False

    def add_bytes(self, nbytes: int) -> None:
        """Reserve bytes, or free a negative number. Raises :class:`Overloaded` if all calls together hold too much.

        No effect after :meth:`release`.
        """
        budget = self._budget
        with budget.lock:
            if self._released:
                return
            if nbytes > 0 and budget.in_use > self.nbytes and budget.in_use + nbytes > budget.limit:
                raise Overloaded(
                    f"requests and responses hold {budget.in_use} bytes, the limit is {budget.limit}; try again later",
                    "bytes",
                )
            budget.in_use += nbytes
            self.nbytes += nbytes

    def release(self) -> None:
        with self._budget.lock:
            if self._released:
                return
            self._released = True
            self._budget.in_use -= self.nbytes
        self._shares.release(self.client)


class MessageBytes:
    """The bytes of one request and its response, as part of what the call's permit holds."""

    __slots__ = ("_nbytes", "_permit")

    def __init__(self, permit: Permit) -> None:
        self._permit = permit
        self._nbytes = 0

    def reserve(self, nbytes: int) -> None:
        """Reserve ``nbytes`` in all for the request. Raises as :meth:`Permit.add_bytes`."""
        if nbytes > self._nbytes:
            self.reserve_more(nbytes - self._nbytes)

    def reserve_more(self, nbytes: int) -> None:
        """Reserve ``nbytes`` in addition: for a response that the client has yet to read, or for data in shared memory.

        Raises as :meth:`Permit.add_bytes`.
        """
        self._permit.add_bytes(nbytes)
        self._nbytes += nbytes

    def release(self) -> None:
        """Release all bytes: the client has the response."""
        self._permit.add_bytes(-self._nbytes)
        self._nbytes = 0
