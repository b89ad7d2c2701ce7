"""Pools of RPCs: calls of each class are admitted or rejected when their headers arrive, before a request is read.

gRPC asks for a handler on the one thread that all calls share, and submits the call to that handler's pool. There the
call is admitted or rejected. A rejected call is answered at once on that thread. An admitted one runs on the pool's
own threads as soon as its request has arrived, so one class of RPCs cannot take the threads of another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from bf16kit.messages.errors import Forbidden, Overloaded, Unauthenticated, Unavailable
from service.grpc.admission import ByteBudget, Permit, Shares
from service.grpc.arrival import find_arrival as find_arrival
from service.grpc.status import Status, status_of
from service.grpc.timeouts import SECONDS_UNDER_PRESSURE, CallTimeouts

_SPARE_THREADS = 4  # to reject calls whose client is only known on a thread
_REFUSAL_REASONS: dict[type[Exception], str] = {Unauthenticated: "unauthenticated", Forbidden: "forbidden"}
# What gRPC gets for a call that it has submitted: it only counts calls in flight with it, if their number is bounded.
_DONE: Future[Any] = Future()
_DONE.set_result(None)
_log = logging.getLogger(__name__)


class RpcPool(ThreadPoolExecutor):
    """The limits, threads and timeouts of one class of RPCs: at most ``limit`` calls, whose bytes ``budget`` bounds.

    A client gets ``receive_seconds`` to send a request and ``send_seconds`` to read a response; less while half of the
    places or bytes are taken, except for what ``patient`` calls send. ``count_refusal`` is called with the reason of
    every rejection before a call reaches a model: ``reason`` if the pool is full.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        what: str,
        reason: str,
        count_refusal: Callable[[str], None],
        *,
        budget: ByteBudget | None = None,
        receive_seconds: float,
        send_seconds: float,
        max_slow: float,
        patient: bool = False,
    ) -> None:
        super().__init__(limit + _SPARE_THREADS, name)
        self.shares = Shares(limit)
        self.budget = budget or ByteBudget()
        self.count_refusal = count_refusal
        shorter = receive_seconds if patient else SECONDS_UNDER_PRESSURE
        self.receive_timeouts = CallTimeouts(receive_seconds, shorter, self._has_pressure, max_slow=max_slow)
        self.send_timeouts = CallTimeouts(send_seconds, SECONDS_UNDER_PRESSURE, self._has_pressure)
        self._what = what
        self._reason = reason
        self._draining = False

    def admit(self, client: str) -> Permit:
        """Return a permit for a call of ``client``. Raises :class:`Overloaded` or :class:`Unavailable`."""
        admitted = self.shares.acquire(client)
        if self._draining:  # asked once the place is counted: whoever drains waits for the others
            if admitted:
                self.shares.release(client)
            raise Unavailable("the server is shutting down; try another", "draining")
        if not admitted:
            limit = f"{self.shares.limit} {self._what} is the limit of this server"
            if self.shares.full:
                raise Overloaded(f"{limit}; try again later", self._reason)
            raise Overloaded(f"{limit}, and this connection has its share; try again later", "connection_share")
        return Permit(self.shares, self.budget, client)

    def drain(self) -> None:
        """Reject every new call from now on."""
        self._draining = True

    def status(self, error: Exception) -> Status:
        """Return the status for an error that ended a call before it reached a model, and count its reason."""
        reason = error.reason if isinstance(error, Overloaded | Unavailable) else _REFUSAL_REASONS.get(type(error))
        if reason:
            self.count_refusal(reason)
        return status_of(error)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Admit and start a call.

        Runs on gRPC's own thread: an exception would end that thread, and with it the server.
        """
        submit = super().submit
        found = find_arrival(args)
        if found is None:
            try:
                return submit(fn, *args, **kwargs)
            except RuntimeError as error:
                _log.warning("no thread can be started for a call, which is not answered: %s", error)
                return _DONE
        call, arrival = found
        try:
            if call.admit(arrival.client):
                call.start(arrival, lambda: submit(fn, *args, **kwargs))
            else:
                fn(*args, **kwargs)  # answers with the rejection, reads nothing, and does not block
        except Exception:  # noqa: BLE001 -- see above
            _log.exception("a call cannot be started; cancelling it")
            call.give_up(arrival)
        return _DONE

    def _has_pressure(self) -> bool:
        return self.shares.half_full or self.budget.half_full
