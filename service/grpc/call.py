"""One call, from its headers until gRPC has nothing left to do for it.

Each class is what gRPC calls a behavior. The call's :class:`~bf16kit.service.grpc.admission.RpcPool` calls
:meth:`~Call.admit` and :meth:`~Call.start` when its headers have arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import grpc

from bf16kit.messages.errors import Cancelled, DeadlineExceeded, InvalidRequest, RequestError, Unavailable
from bf16kit.service.grpc.admission import MessageBytes, Permit, RequiredScope, RpcPool
from bf16kit.service.grpc.arrival import Arrival
from bf16kit.service.grpc.status import Status
from bf16kit.service.grpc.timeouts import CallTimeouts
from bf16kit.service.request import Cancellation
from bf16kit.service.wire.limits import MessageReader

Metadata = Sequence[tuple[str, str | bytes]] | None
_NEVER = 1e9  # seconds: gRPC gives a call without a deadline a time remaining beyond any clock


@dataclass(frozen=True)
class Rpc:
    """One RPC: its pool, the token that it needs, and the function that handles it.

    * ``handler`` of a :class:`UnaryCall` takes the request and the call, and returns the response or a :class:`Status`.
    * ``handler`` of an :class:`InferenceCall` takes the request, the call and a function that takes such a result, and
      calls that function once, on any thread.
    * ``handler`` of a :class:`~bf16kit.service.grpc.stream.StreamCall` takes an iterator of
      :class:`~bf16kit.service.grpc.stream.StreamRequest` and the call. It yields such a result for each, in order.
    * ``handler`` of a :class:`WatchCall` takes the request, the call and a function that sends a response (None ends
      the stream). It returns at once.
    * ``may_read_at_once``: whether a request with these bytes is decoded too quickly to be handed to another thread.
    """

    pool: RpcPool
    required: RequiredScope
    read: MessageReader
    serialize: Callable[[Any], bytes]
    handler: Callable[..., Any]
    may_read_at_once: Callable[[bytes], bool] = lambda data: False


class Call:
    """One call, as an RPC sees it. ``started`` and ``deadline`` are :func:`time.monotonic` seconds."""

    def __init__(self, rpc: Rpc, metadata: Metadata) -> None:
        self.started = time.monotonic()
        self.deadline: float | None = None
        self.cancellation = Cancellation()
        self.experimental_thread_pool = rpc.pool  # gRPC's name: where it runs the call
        self._metadata = metadata
        self._rpc = rpc
        self._pool = rpc.pool
        self._cancel: Callable[[], None] = lambda: None  # ends the call
        self._permit: Permit | None = None
        self._held: MessageBytes | None = None  # what the only request holds, if there is one
        self._rejection: RequestError | None = None
        self._aborted = self._has_ended = False
        try:
            rpc.required.check(self.metadata_value("authorization"))
        except RequestError as error:
            self._rejection = error

    @property
    def client(self) -> str:
        """The client: the connection that the call's permit counts against."""
        return self._permit.client if self._permit is not None else ""

    def metadata_value(self, key: str) -> str | bytes | None:
        return next((value for name, value in self._metadata or () if name == key), None)

    def reserve_more(self, nbytes: int) -> None:
        """Count ``nbytes`` of a response or of shared memory until the call ends. Raises Overloaded without room."""
        if self._held is not None:
            self._held.reserve_more(nbytes)

    # --- on gRPC's own thread -----------------------------------------------------------------------------------------

    def admit(self, arrival: Arrival) -> bool:
        """Get a permit for the client. False: the call is rejected, and its behavior answers with the error at once."""
        if self._rejection is None:
            try:
                self._permit = self._pool.admit(arrival.client)
            except RequestError as error:
                self._rejection = error
        return self._rejection is None

    def start(self, arrival: Arrival, answer: Callable[[], object]) -> None:
        """Start an admitted call. ``answer`` runs its behavior, and sends what that returns."""
        self._cancel = arrival.cancel
        remaining = arrival.time_remaining()
        if remaining <= _NEVER:
            self.deadline = time.monotonic() + remaining
        arrival.on_end(self._on_end)
        self._run(arrival, answer)

    def give_up(self, arrival: Arrival) -> None:
        """Cancel a call that cannot run."""
        self._on_end()
        arrival.cancel()

    def _run(self, arrival: Arrival, answer: Callable[[], object]) -> None:
        """Have ``answer`` run, on a thread."""
        self._hand_over(answer)

    def _hand_over(self, work: Callable[[], object]) -> None:
        """Run ``work`` on a thread; cancel the call if none is left: an exception would end gRPC's own thread."""
        try:
            self._pool.run(work)
        except RuntimeError:
            self._on_end()
            self._cancel()

    def _on_end(self) -> None:
        """Release everything: gRPC has nothing left to do for the call."""
        self._has_ended = True
        self._pool.receive_timeouts.clear(self)
        self._pool.send_timeouts.clear(self)
        if self._permit is not None:
            self._permit.release()
        self.cancellation.cancel()

    # --- on the call's thread -----------------------------------------------------------------------------------------

    def _check(self) -> Permit:
        """Return the call's permit. Raises what rejects the call, or Cancelled or DeadlineExceeded if it is over."""
        if self._rejection is not None or self._permit is None:
            raise self._rejection or Unavailable("the call was not admitted")
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

    def _abort(self, context: grpc.ServicerContext, status: Status) -> None:
        """End the call with ``status``. Raises an exception that only gRPC may catch."""
        self._aborted = True
        context.abort(status.code, status.details)

    def _start_timeout(self, timeouts: CallTimeouts, on_timeout: Callable[[], None]) -> None:
        """Start this client's timeout; clear it at once if :meth:`_on_end` has run already."""
        timeouts.start(self, on_timeout)
        if self._has_ended:
            timeouts.clear(self)

    def _end_slow_call(self) -> None:
        """End the call: the client has kept the server waiting for too long."""
        self._pool.count_refusal("too_slow")
        self._cancel()


class UnaryCall(Call):
    """One request, received before the call has a thread, and one response."""

    def __init__(self, rpc: Rpc, metadata: Metadata) -> None:
        super().__init__(rpc, metadata)
        self._data: bytes | None = None

    def __call__(self, _: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        response = self._response()
        if isinstance(response, Status):
            self._abort(context, response)
        # Until the call has ended: the client may not read.
        self._start_timeout(self._pool.send_timeouts, self._end_slow_call)
        return response

    def _run(self, arrival: Arrival, answer: Callable[[], object]) -> None:
        self._start_timeout(self._pool.receive_timeouts, self._end_slow_call)
        arrival.read(self.received, lambda: self._on_request(arrival, answer))

    def received(self, data: bytes) -> bytes:
        """Keep the message, which is complete."""
        self._data = data
        self._pool.receive_timeouts.clear(self)
        return data

    def _on_request(self, arrival: Arrival, answer: Callable[[], object]) -> None:
        """Count the bytes of the request, and answer it. Without room, or a request, ``answer`` sends the rejection."""
        try:
            self._held = MessageBytes(self._check())
            if self._data is None:
                raise InvalidRequest("the call ended without a request")
            self._held.reserve(len(self._data))
        except RequestError as error:
            self._rejection = error
            answer()
        else:
            self._answer(arrival, answer)

    def _answer(self, arrival: Arrival, answer: Callable[[], object]) -> None:
        self._hand_over(answer)

    def _on_end(self) -> None:
        self._data = None
        super()._on_end()

    def _response(self) -> Any:
        """Return the response, or the status that ends the call."""
        try:
            return self._rpc.handler(self._request(), self)
        except Exception as error:  # noqa: BLE001 -- the table decides what the client may know
            return self._status(error)

    def _request(self) -> Any:
        self._check()
        data, self._data = self._data, None
        if data is None or self._held is None:
            raise Cancelled("the client left before its request was read")
        return self._parse(data, self._held)


class InferenceCall(UnaryCall):
    """A call whose model answers later, on another thread: no thread waits for it meanwhile.

    A small request is decoded and queued on gRPC's own thread, which saves a change of threads. No model runs there.
    """

    def _answer(self, arrival: Arrival, answer: Callable[[], object]) -> None:
        begin = partial(self._begin, arrival)
        if self._rpc.may_read_at_once(self._data or b""):
            begin()
        else:
            self._hand_over(begin)

    def _begin(self, arrival: Arrival) -> None:
        respond = partial(self._respond, arrival)
        try:
            self._rpc.handler(self._request(), self, respond)
        except Exception as error:  # noqa: BLE001 -- as above
            respond(self._status(error))

    def _respond(self, arrival: Arrival, result: Any) -> None:
        """Send the response, or the status that ends the call; nothing if the client has left."""
        if self._has_ended:
            return
        try:
            response = result if isinstance(result, Status) else self._rpc.serialize(result)
        except Exception as error:  # noqa: BLE001 -- as above
            response = self._status(error)
        if isinstance(response, Status):
            arrival.reject(response.code, response.details)
        else:
            self._start_timeout(self._pool.send_timeouts, self._end_slow_call)
            arrival.respond(response)


class WatchCall(UnaryCall):
    """One request, and responses that other threads send at each change."""

    experimental_non_blocking: ClassVar[bool] = True  # gRPC's name: the thread is free once the handler returns

    def __call__(  # type: ignore[override]  # gRPC calls it with another argument
        self, _: Iterator[bytes], context: grpc.ServicerContext, send: Callable[[Any], None]
    ) -> None:
        def send_in_time(response: Any) -> None:  # it blocks while the client does not read
            self._start_timeout(self._pool.send_timeouts, self._end_slow_call)
            send(response)
            self._pool.send_timeouts.clear(self)

        try:
            self._rpc.handler(self._request(), self, send_in_time)
        except grpc.RpcError:  # raised by gRPC: the client has left
            raise
        except Exception as error:  # noqa: BLE001 -- as above
            self._abort(context, self._status(error))
