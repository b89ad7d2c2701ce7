"""One call, from its headers until gRPC has nothing left to do for it.

Each class is what gRPC calls a behavior. A call comes in through a :class:`~service.grpc.lane.Lane`, which calls
:meth:`~Call.admit` before gRPC gives the call a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import grpc
from google.protobuf.message import DecodeError, Message

from bf16kit.messages.errors import Cancelled, DeadlineExceeded, InvalidRequest, RequestError, Unavailable
from service.grpc.admission import CallBytes, Place
from service.grpc.arrival import Arrival
from service.grpc.claims import ClaimedModel
from service.grpc.credentials import Metadata
from service.grpc.status import Status
from service.grpc.watchdog import CallTimeouts
from service.request import Cancellation
from service.wire.inflate import Inflater

if TYPE_CHECKING:
    from service.grpc.lane import Lane

_SMALL = 4 << 10  # largest request, in bytes, that may be read on gRPC's own thread
_NEVER = 1e9  # seconds: gRPC gives a call without a deadline a time remaining beyond any clock


@dataclass(frozen=True)
class Rpc:
    """One RPC: how its messages are parsed and serialised, and the function that handles it.

    * ``handler`` of a ``unary`` RPC takes the request and the call, and returns the response or a :class:`Status`.
    * ``handler`` of a ``stream`` takes an iterator of :class:`~service.grpc.streamcall.StreamRequest`. It yields
      such a result for each, in order.
    * ``handler`` of a ``watch`` takes the request, the call and a function that sends a response (None ends the
      stream). It returns at once.
    * ``reads_request`` False: the request is empty, and is not waited for.
    * ``claim`` inspects a request's bytes on gRPC's own thread. With its result the request is answered on that thread,
      which must not take long.
    """

    inflate: Inflater
    parse: Callable[[bytes, Callable[[int], None]], Any]
    serialize: Callable[[Any], bytes]
    handler: Callable[..., Any]
    kind: Literal["unary", "stream", "watch"] = "unary"
    reads_request: bool = True
    claim: Callable[[bytes], ClaimedModel | None] | None = None

    def parsed(self, data: bytes, reserve: Callable[[int], None]) -> Message:
        """Return the message in ``data``. ``reserve`` is called with its size in bytes, and may raise.

        Raises InvalidRequest if ``data`` is no such message.
        """
        data = self.inflate(data, reserve)
        try:
            message: Message = self.parse(data, reserve)
        except DecodeError:
            raise InvalidRequest("the request is not a message of this RPC: its bytes cannot be parsed") from None
        return message


class Call:
    """One call, as an RPC sees it. ``started`` and ``deadline`` are :func:`time.monotonic` seconds."""

    def __init__(self, rpc: Rpc, lane: Lane) -> None:
        self.started = time.monotonic()
        self.cancellation = Cancellation()
        self.claimed: ClaimedModel | None = None
        self.nbytes = 0  # bytes of its only request as received; 0: it has several, or the request is not there yet
        self.context: Any = None
        self.experimental_thread_pool = lane.threads  # gRPC's name: where it runs the call
        self._rpc = rpc
        self._lane = lane
        self._arrival: Arrival | None = None
        self._place: Place | None = None
        self._call_bytes: CallBytes | None = None
        self._rejection: RequestError | None = None
        self._aborted = self._has_ended = False

    @property
    def deadline(self) -> float | None:
        remaining = self.context.time_remaining()
        return None if remaining > _NEVER else time.monotonic() + remaining

    @property
    def streams(self) -> bool:
        """Whether it has several requests."""
        return self._rpc.kind == "stream"

    @property
    def client(self) -> str:
        """The client: the connection that the call's place counts against."""
        return self._place.client if self._place is not None else ""

    @property
    def metadata(self) -> Metadata:
        found: Metadata = self.context.invocation_metadata()
        return found

    def metadata_value(self, key: str) -> str | bytes | None:
        return next((value for name, value in self.metadata or () if name == key), None)

    def abort(self, status: Status) -> None:
        """End the call with ``status``. Raises an exception that only gRPC may catch."""
        self._aborted = True
        self.context.abort(status.code, status.details)

    def reserve_more(self, nbytes: int) -> None:
        """Count ``nbytes`` of a response or of shared memory until the call ends. Raises Overloaded if there is no
        room."""
        if self._call_bytes is not None:
            self._call_bytes.reserve_more(nbytes)

    def admit(self, client: str) -> bool:
        """Acquire a place for ``client``. False: the call is rejected, and :meth:`_check_admitted` raises the error."""
        try:
            self._place = self._lane.admission.admit(client)
        except RequestError as error:
            self._rejection = error
        return self._rejection is None

    def start(self, arrival: Arrival, submit: Callable[[], object], run: Callable[[], object]) -> None:
        """Start an admitted call: ``submit`` hands it to a thread, ``run`` runs it on this one, gRPC's own."""
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

    def _check_admitted(self, context: grpc.ServicerContext) -> Place:
        """Return the call's place, on the call's own thread.

        Raises the error that rejects the call, or Cancelled or DeadlineExceeded if it is over.
        """
        self.context = context
        if self._rejection is None and self._place is None:  # the client was unknown until now
            self.admit(context.peer())
        if self._rejection is not None or self._place is None:
            # Also with a place taken just now: this may be gRPC's own thread, which must not wait for a request.
            raise self._rejection or Unavailable("the call was not admitted")
        if self._arrival is None and not context.add_callback(self._on_end):  # it ended before it got this thread
            self._on_end()
        self._check_client_waits()
        return self._place

    def _check_client_waits(self) -> None:
        """Raises Cancelled or DeadlineExceeded if the client does not wait for the response any more."""
        if self._has_ended:
            raise Cancelled("the client left before its request was read")
        if self.context.time_remaining() <= 0:
            raise DeadlineExceeded("the deadline passed before the request was read")

    def _on_end(self) -> None:
        """Release everything: gRPC has nothing left to do for the call."""
        self._has_ended = True
        self.cancellation.cancel()
        self._lane.receive_timeouts.clear(self)
        self._lane.send_timeouts.clear(self)
        if self._place is not None:
            self._place.release()

    def _start_timeout(self, timeouts: CallTimeouts, on_timeout: Callable[[], None]) -> None:
        """Start this client's timeout; clear it at once if the call is over: :meth:`_on_end` has run already."""
        timeouts.start(self, on_timeout)
        if self._has_ended:
            timeouts.clear(self)

    def _end_slow_call(self) -> None:
        """End the call: the client has kept the server waiting for too long."""
        self._lane.count_refusal("too_slow")
        (self._arrival or self.context).cancel()

    def _parse(self, data: bytes, call_bytes: CallBytes) -> Message:
        """Parse a message and count its bytes. Large ones wait their turn, and the client may leave meanwhile."""

        def reserve(nbytes: int) -> None:
            self._check_client_waits()
            call_bytes.reserve(nbytes)

        return self._rpc.parsed(data, reserve)


class OneRequest(Call):
    """A call with one request, received before it has a thread where this grpcio allows it."""

    def __init__(self, rpc: Rpc, lane: Lane) -> None:
        super().__init__(rpc, lane)
        self._data: bytes | None = None

    def start(self, arrival: Arrival, submit: Callable[[], object], run: Callable[[], object]) -> None:
        if not self._rpc.reads_request:
            return super().start(arrival, submit, run)
        self._arrival = arrival
        arrival.on_end(self._on_end)
        self._start_timeout(self._lane.receive_timeouts, self._end_slow_call)
        return arrival.read(self.received, lambda: self._run(arrival, submit, run))

    def _run(self, arrival: Arrival, submit: Callable[[], object], run: Callable[[], object]) -> None:
        """Run the request, on this thread if its model is idle and quick: another thread would only add delay."""
        if self._rpc.claim is not None and self._data is not None and len(self._data) <= _SMALL:
            self.claimed = self._rpc.claim(self._data)
        if self.claimed is None:
            self._hand_over(arrival, submit)
            return
        try:
            run()
        finally:
            self.claimed.release()

    def received(self, data: bytes) -> bytes:
        """Keep the message, which is complete. It is parsed on the call's own thread."""
        self._data = data
        self._lane.receive_timeouts.clear(self)
        return data

    def _forget_context(self) -> None:
        """Drop the context, which has a reference to this call.

        Otherwise the cycle would keep the call, and gRPC's memory for its stream, until Python collects garbage.
        """
        if self._arrival is not None:
            self.context = None

    def _receive(self, messages: Iterator[bytes], place: Place) -> Message:
        if self._arrival is None:
            self._start_timeout(self._lane.receive_timeouts, self._end_slow_call)
            self._data = next(messages, None)
        data, self._data = self._data, None
        if data is None:
            raise InvalidRequest("the call ended without a request")
        self._call_bytes = CallBytes(place)
        self.nbytes = len(data)
        return self._parse(data, self._call_bytes)


class UnaryCall(OneRequest):
    """A behavior for gRPC: one request, one response."""

    def __call__(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        try:
            return self._respond(messages, context)
        finally:
            self._forget_context()

    def _respond(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        try:
            place = self._check_admitted(context)
            response = self._rpc.handler(self._receive(messages, place) if self._rpc.reads_request else None, self)
        except grpc.RpcError:  # raised by gRPC: the client has left
            raise
        except Exception as error:  # noqa: BLE001 -- the table decides what the client may know
            response = self._lane.status(error)
        if isinstance(response, Status):
            self.abort(response)
        # Until the call has ended: the client may not read.
        self._start_timeout(self._lane.send_timeouts, self._end_slow_call)
        return response


class WatchCall(OneRequest):
    """A behavior for gRPC: one request, and responses that other threads send at each change."""

    experimental_non_blocking = True  # gRPC's name: the thread is free once the handler returns

    def __call__(self, messages: Iterator[bytes], context: grpc.ServicerContext, send: Callable[[Any], None]) -> None:
        try:
            place = self._check_admitted(context)
            self._rpc.handler(self._receive(messages, place), self, self._sender(send))
        except grpc.RpcError:
            raise
        except Exception as error:  # noqa: BLE001 -- as above
            self.abort(self._lane.status(error))
        finally:
            self._forget_context()

    def _sender(self, send: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return ``send`` with a timeout, because it blocks while the client does not read."""

        def send_in_time(response: Any) -> None:
            self._start_timeout(self._lane.send_timeouts, self._end_slow_call)
            send(response)
            self._lane.send_timeouts.clear(self)

        return send_in_time
