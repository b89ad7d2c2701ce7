"""One call, from its headers until gRPC has nothing left to do for it.

Each class is what gRPC calls a behavior. The call's :class:`~service.grpc.admission.RpcPool` calls :meth:`~Call.admit`
and :meth:`~Call.start` before gRPC gives the call a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc

from bf16kit.messages.errors import Cancelled, DeadlineExceeded, InvalidRequest, RequestError, Unavailable, Unsupported
from service.grpc.access import Metadata, RequiredScope
from service.grpc.admission import MessageBytes, Permit, RpcPool
from service.grpc.arrival import Arrival
from service.grpc.status import Status
from service.grpc.timeouts import CallTimeouts
from service.request import Cancellation
from service.wire.limits import MessageReader

_NEVER = 1e9  # seconds: gRPC gives a call without a deadline a time remaining beyond any clock


@dataclass(frozen=True)
class Rpc:
    """One RPC: its pool, the token that it needs, and the function that handles it.

    * ``handler`` of a :class:`UnaryCall` takes the request and the call, and returns the response or a :class:`Status`.
    * ``handler`` of a :class:`~service.grpc.stream.StreamCall` takes an iterator of
      :class:`~service.grpc.stream.StreamRequest` and the call. It yields such a result for each, in order.
    * ``handler`` of a :class:`WatchCall` takes the request, the call and a function that sends a response (None ends
      the stream). It returns at once.
    * ``off``: why the server does not offer the RPC; all its calls are rejected.
    """

    pool: RpcPool
    required: RequiredScope
    read: MessageReader
    serialize: Callable[[Any], bytes]
    handler: Callable[..., Any]
    off: str = ""


class Call:
    """One call, as an RPC sees it. ``started`` and ``deadline`` are :func:`time.monotonic` seconds."""

    def __init__(self, rpc: Rpc, metadata: Metadata) -> None:
        self.started = time.monotonic()
        self.deadline: float | None = None  # not known before the call has a thread
        self.cancellation = Cancellation()
        self.experimental_thread_pool = rpc.pool  # gRPC's name: where it runs the call
        self._metadata = metadata
        self._context: Any = None
        self._rpc = rpc
        self._pool = rpc.pool
        self._arrival: Arrival | None = None
        self._permit: Permit | None = None
        self._held: MessageBytes | None = None  # what the only request holds, if there is one
        self._rejection: RequestError | None = None
        self._aborted = self._has_ended = False
        try:
            rpc.required.check(self.metadata_value("authorization"))
            if rpc.off:
                raise Unsupported(rpc.off)
        except RequestError as error:
            self._rejection = error

    @property
    def client(self) -> str:
        """The client: the connection that the call's permit counts against."""
        return self._permit.client if self._permit is not None else ""

    def metadata_value(self, key: str) -> str | bytes | None:
        return next((value for name, value in self._metadata or () if name == key), None)

    def reserve_more(self, nbytes: int) -> None:
        """Count ``nbytes`` of a response or of shared memory until the call ends. Raises Overloaded if there is no
        room."""
        if self._held is not None:
            self._held.reserve_more(nbytes)

    # --- on gRPC's own thread -----------------------------------------------------------------------------------------

    def admit(self, client: str) -> bool:
        """Get a permit for ``client``. False: the call is rejected, and :meth:`_begin` raises the error."""
        if self._rejection is None:
            try:
                self._permit = self._pool.admit(client)
            except RequestError as error:
                self._rejection = error
        return self._rejection is None

    def start(self, arrival: Arrival, submit: Callable[[], object]) -> None:
        """Start an admitted call: ``submit`` hands it to a thread."""
        self._arrival = arrival
        arrival.on_end(self._on_end)
        self._hand_over(arrival, submit)

    def _hand_over(self, arrival: Arrival, submit: Callable[[], object]) -> None:
        """Submit the call to a thread; cancel it if none is left: an exception would end gRPC's own thread."""
        try:
            submit()
        except RuntimeError:
            self.give_up(arrival)

    def give_up(self, arrival: Arrival) -> None:
        """Cancel a call that cannot run."""
        self._on_end()
        arrival.cancel()

    def _on_end(self) -> None:
        """Release everything: gRPC has nothing left to do for the call."""
        self._has_ended = True
        self.cancellation.cancel()
        self._pool.receive_timeouts.clear(self)
        self._pool.send_timeouts.clear(self)
        if self._permit is not None:
            self._permit.release()

    # --- on the call's thread -----------------------------------------------------------------------------------------

    def _begin(self, context: grpc.ServicerContext) -> Permit:
        """Return the call's permit.

        Raises the error that rejects the call, or Cancelled or DeadlineExceeded if it is over.
        """
        self._context = context
        if self._rejection is None and self._permit is None:  # the client was unknown until now
            self.admit(context.peer())
        if self._rejection is not None or self._permit is None:
            # Also with a permit taken just now: this may be gRPC's own thread, which must not wait for a request.
            raise self._rejection or Unavailable("the call was not admitted")
        if self._arrival is None and not context.add_callback(self._on_end):  # it ended before it got this thread
            self._on_end()
        remaining = context.time_remaining()
        if remaining <= _NEVER:
            self.deadline = time.monotonic() + remaining
        self._check_client_waits()
        return self._permit

    def _check_client_waits(self) -> None:
        """Raises Cancelled or DeadlineExceeded if the client does not wait for the response any more."""
        if self._has_ended:
            raise Cancelled("the client left before its request was read")
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise DeadlineExceeded("the deadline passed before the request was read")

    def _parse(self, data: bytes, held: MessageBytes) -> Any:
        """Parse a message and count its bytes. Large ones wait their turn, and the client may leave meanwhile."""

        def reserve(nbytes: int) -> None:
            self._check_client_waits()
            held.reserve(nbytes)

        return self._rpc.read(data, reserve)

    def _status(self, error: Exception) -> Status:
        """Return the status that ends the call with ``error``, whose traceback refers to the call: no cycle is left."""
        self._rejection = None
        return self._pool.status(error)

    def _abort(self, status: Status) -> None:
        """End the call with ``status``. Raises an exception that only gRPC may catch."""
        self._aborted = True
        self._context.abort(status.code, status.details)

    def _start_timeout(self, timeouts: CallTimeouts, on_timeout: Callable[[], None]) -> None:
        """Start this client's timeout; clear it at once if the call is over: :meth:`_on_end` has run already."""
        timeouts.start(self, on_timeout)
        if self._has_ended:
            timeouts.clear(self)

    def _end_slow_call(self) -> None:
        """End the call: the client has kept the server waiting for too long."""
        self._pool.count_refusal("too_slow")
        (self._arrival or self._context).cancel()


class UnaryCall(Call):
    """One request, received before the call has a thread where this grpcio allows it, and one response."""

    def __init__(self, rpc: Rpc, metadata: Metadata) -> None:
        super().__init__(rpc, metadata)
        self._data: bytes | None = None

    def __call__(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        try:
            response = self._respond(messages, context)
            if isinstance(response, Status):
                self._abort(response)
            # Until the call has ended: the client may not read.
            self._start_timeout(self._pool.send_timeouts, self._end_slow_call)
            return response
        finally:
            self._forget_context()

    def start(self, arrival: Arrival, submit: Callable[[], object]) -> None:
        self._arrival = arrival
        arrival.on_end(self._on_end)
        self._start_timeout(self._pool.receive_timeouts, self._end_slow_call)
        arrival.read(self.received, lambda: self._hand_over(arrival, submit))

    def received(self, data: bytes) -> bytes:
        """Keep the message, which is complete. It is parsed on the call's own thread."""
        self._data = data
        self._pool.receive_timeouts.clear(self)
        return data

    def _respond(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        """Return the response, or the status that ends the call."""
        try:
            permit = self._begin(context)
            return self._rpc.handler(self._request(messages, permit), self)
        except grpc.RpcError:  # raised by gRPC: the client has left
            raise
        except Exception as error:  # noqa: BLE001 -- the table decides what the client may know
            return self._status(error)

    def _request(self, messages: Iterator[bytes], permit: Permit) -> Any:
        if self._arrival is None:
            self._start_timeout(self._pool.receive_timeouts, self._end_slow_call)
            self._data = next(messages, None)
        data, self._data = self._data, None
        if data is None:
            raise InvalidRequest("the call ended without a request")
        self._held = MessageBytes(permit)
        return self._parse(data, self._held)

    def _forget_context(self) -> None:
        """Drop the context, which has a reference to this call.

        Otherwise the cycle would keep the call, and gRPC's memory for its stream, until Python collects garbage.
        """
        if self._arrival is not None or self._permit is None:
            self._context = None


class WatchCall(UnaryCall):
    """One request, and responses that other threads send at each change."""

    experimental_non_blocking: ClassVar[bool] = True  # gRPC's name: the thread is free once the handler returns

    def __call__(  # type: ignore[override]  # gRPC calls it with another argument
        self, messages: Iterator[bytes], context: grpc.ServicerContext, send: Callable[[Any], None]
    ) -> None:
        def send_in_time(response: Any) -> None:  # it blocks while the client does not read
            self._start_timeout(self._pool.send_timeouts, self._end_slow_call)
            send(response)
            self._pool.send_timeouts.clear(self)

        try:
            permit = self._begin(context)
            self._rpc.handler(self._request(messages, permit), self, send_in_time)
        except grpc.RpcError:
            raise
        except Exception as error:  # noqa: BLE001 -- as above
            self._abort(self._status(error))
        finally:
            self._forget_context()
