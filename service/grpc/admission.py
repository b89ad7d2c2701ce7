"""Which calls come in: by their token, and by how much the server holds. The others are rejected before they are read.

gRPC asks for a handler on the one thread that all calls share, when a call's headers have arrived, and submits the call
to that handler's pool. There it gets a permit, or is rejected at once on that thread. Once its request has arrived, an
admitted call runs on the pool's own threads, so one class of RPCs cannot take the threads of another; a small inference
is queued at once. A call releases its permit when gRPC has nothing left to do for it. A client that does not read its
response therefore keeps its permit, and the bytes of its response stay counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from bf16kit.messages.errors import Forbidden, Overloaded, RequestError, Unauthenticated, Unavailable
from bf16kit.service.config.tokens import Scope, TokenFile
from bf16kit.service.grpc.arrival import find_arrival
from bf16kit.service.grpc.status import Status, status_of
from bf16kit.service.grpc.timeouts import SECONDS_UNDER_PRESSURE, CallTimeouts

# What gRPC gets for a call that it has submitted: it only counts calls in flight with it, if their number is bounded.
_DONE: Future[Any] = Future()
_DONE.set_result(None)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequiredScope:
    """The requirement of a call: one of ``tokens`` with this ``scope``. If either is None, there is no requirement."""

    tokens: TokenFile | None = None
    scope: Scope | None = None

    def check(self, authorization: str | bytes | None) -> None:
        """Check a call's metadata ``authorization``. Raises Unauthenticated without a known token, or Forbidden."""
        if self.tokens is None or self.scope is None:
            return
        scopes = self.tokens.scopes(authorization) if isinstance(authorization, str) else None
        if scopes is None:
            text = "this call needs a valid token: send metadata 'authorization: Bearer …'"
            raise Unauthenticated(text, "unauthenticated")
        if self.scope not in scopes:
            raise Forbidden(f"the token lacks the scope {self.scope!r}, which this call needs", "forbidden")


class Shares:
    """Divides ``limit`` places among holders.

    While half of the places are free, every holder may take one. After that each may have an equal part. The last
    eighth is for holders of very few places: newcomers find room however many calls one client sends.
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
    """The bytes of requests and responses that all calls hold together, at most ``limit``. One alone may hold more."""

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

    def __init__(self, shares: Shares | None, budget: ByteBudget, client: str) -> None:
        """``client`` holds a place of ``shares``, which the permit releases; None: it only holds bytes."""
        self.client = client
        self.nbytes = 0
        self._shares = shares
        self._budget = budget
        self._released = False

    def add_bytes(self, nbytes: int) -> None:
        """Reserve bytes, or free a negative number; no effect after :meth:`release`. Raises Overloaded without room."""
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
        if self._shares is not None:
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
        """Reserve ``nbytes`` in addition, for a response or for data in shared memory. Raises as :meth:`reserve`."""
        self._permit.add_bytes(nbytes)
        self._nbytes += nbytes

    def release(self) -> None:
        """Release all bytes: the client has the response."""
        self._permit.add_bytes(-self._nbytes)
        self._nbytes = 0


class RpcPool(ThreadPoolExecutor):
    """The limits, threads and timeouts of one class of RPCs: at most ``limit`` calls, whose bytes ``budget`` bounds.

    A client gets ``receive`` seconds to send a request and ``send`` seconds to read a response; less while half of the
    places or bytes are taken, or the server stops. At most ``max_slow`` may be slow to send. ``count_refusal`` is
    called with the reason of every rejection before a call reaches a model: ``reason`` if the pool is full.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        what: str,
        reason: str,
        count_refusal: Callable[[str], None],
        receive: float,
        send: float,
        max_slow: int,
        budget: ByteBudget | None = None,
        threads: int | None = None,
    ) -> None:
        """``threads``: fewer than one for each call, for calls that need one only for a moment."""
        super().__init__(threads or limit, name)
        self.shares = Shares(limit)
        self.budget = budget or ByteBudget()
        self.count_refusal = count_refusal
        self.receive_timeouts = CallTimeouts(receive, SECONDS_UNDER_PRESSURE, self._has_pressure, max_slow=max_slow)
        self.send_timeouts = CallTimeouts(send, SECONDS_UNDER_PRESSURE, self._has_pressure)
        self._what = what
        self._reason = reason
        self._draining = False
        self.last_drained = 0.0  # when a call was last rejected because of that, in seconds of time.monotonic()

    def admit(self, client: str) -> Permit:
        """Return a permit for a call of ``client``. Raises :class:`Overloaded` or :class:`Unavailable`."""
        admitted = self.shares.acquire(client)
        if self._draining:  # asked once the place is counted: whoever drains waits for the others
            if admitted:
                self.shares.release(client)
            self.last_drained = time.monotonic()
            raise Unavailable("the server is shutting down; try another", "draining")
        if not admitted:
            limit = f"{self.shares.limit} {self._what} is the limit of this server"
            if self.shares.full:
                raise Overloaded(f"{limit}; try again later", self._reason)
            raise Overloaded(f"{limit}, and this connection has its share; try again later", "connection_share")
        return Permit(self.shares, self.budget, client)

    def drain(self, grace: float) -> None:
        """Reject every new call. Wait for clients no longer than under pressure, and than half of ``grace`` seconds."""
        self.receive_timeouts.shorten(grace / 2)
        self.send_timeouts.shorten(grace / 2)
        self._draining = True

    def status(self, error: Exception) -> Status:
        """Return the status for an error that ended a call before it reached a model, and count its reason."""
        if isinstance(error, RequestError) and error.reason:
            self.count_refusal(error.reason)
        return status_of(error)

    def run(self, work: Callable[[], object]) -> None:
        """Run ``work`` on a thread of the pool. Raises RuntimeError if the system has no thread left for it."""
        super().submit(work)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Admit and start a call, on gRPC's own thread: an exception would end that thread, and with it the server."""
        call, arrival = find_arrival(args)
        answer = partial(fn, *args, **kwargs)
        try:
            if call.admit(arrival):
                call.start(arrival, answer)
            else:
                answer()  # with the rejection: it reads nothing, and does not block
        except Exception:  # noqa: BLE001 -- see above
            _log.exception("a call cannot be started; cancelling it")
            call.give_up(arrival)
        return _DONE

    def _has_pressure(self) -> bool:
        return self._draining or self.shares.half_full or self.budget.half_full
