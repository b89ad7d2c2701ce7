"""One call, from its headers to the moment when gRPC has nothing left to do for it.

Each class is what gRPC calls a behavior. It comes in by a :class:`~service.transport.lane.Lane`, which has asked it to
:meth:`~Call.admit` its client before gRPC gives it a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import grpc
from google.protobuf.message import DecodeError, Message

from bf16kit.errors import Cancelled, DeadlineExceeded, InvalidRequest, RequestError, Unavailable
from service.request import Cancellation
from service.transport.admission import Held, Place
from service.transport.arrival import Arrival
from service.transport.claims import Claimed
from service.transport.credentials import Metadata
from service.transport.status import Status
from service.transport.watchdog import Patience
from service.wire.inflate import Inflater

if TYPE_CHECKING:
    from service.transport.lane import Lane

_SMALL = 4 << 10  # bytes of a request that may be read on gRPC's own thread
_NEVER = 1e9  # seconds: gRPC gives a call without a deadline a time remaining beyond any clock


@dataclass(frozen=True)
class Rpc:
    """One RPC: how its messages are read and written, and what answers it.

    ``answer`` takes the request and the call, and returns the response or a :class:`Status`. For a ``stream`` it takes
    an iterator of :class:`~service.transport.streamcall.StreamRequest`, and yields what it would return for each, in
    their order. For a ``watch`` it takes the request, the call and a function that sends a response (or with None ends
    the stream), and returns at once. ``reads`` False: the request says nothing, and is not waited for. ``claim`` looks
    at the bytes of a request on gRPC's own thread: with what it gives the request is answered there and then, which
    must not take long.
    """

    inflate: Inflater
    parse: Callable[[bytes, Callable[[int], None]], Any]
    serialize: Callable[[Any], bytes]
    answer: Callable[..., Any]
    kind: Literal["unary", "stream", "watch"] = "unary"
    reads: bool = True
    claim: Callable[[bytes], Claimed | None] | None = None

    def parsed(self, data: bytes, hold: Callable[[int], None]) -> Message:
        """The message in ``data``; ``hold`` is told what it takes, and may raise. Raises InvalidRequest where it is
        none."""
        data = self.inflate(data, hold)
        try:
            message: Message = self.parse(data, hold)
        except DecodeError:
            raise InvalidRequest("the request is not a message of this RPC: its bytes cannot be parsed") from None
        return message


class Call:
    """What an RPC may know of its call. ``started`` and ``deadline`` are :func:`time.monotonic` seconds."""

    def __init__(self, rpc: Rpc, lane: Lane) -> None:
        self.started = time.monotonic()
        self.cancellation = Cancellation()
        self.claimed: Claimed | None = None
        self.nbytes = 0  # of its one request, as it came; 0: it has many, or nobody knows yet
        self.context: Any = None
        self.experimental_thread_pool = lane.threads  # gRPC's name: where it runs the call
        self._rpc = rpc
        self._lane = lane
        self._arrival: Arrival | None = None
        self._place: Place | None = None
        self._held: Held | None = None
        self._refused: RequestError | None = None
        self._aborted = self._over = False

    @property
    def deadline(self) -> float | None:
        remaining = self.context.time_remaining()
        return None if remaining > _NEVER else time.monotonic() + remaining

    @property
    def streams(self) -> bool:
        """Whether it has many requests."""
        return self._rpc.kind == "stream"

    @property
    def client(self) -> str:
        """Whose call it is: the connection that its place was taken for."""
        return self._place.client if self._place is not None else ""

    @property
    def metadata(self) -> Metadata:
        found: Metadata = self.context.invocation_metadata()
        return found

    def metadatum(self, key: str) -> str | bytes | None:
        return next((value for name, value in self.metadata or () if name == key), None)

    def abort(self, status: Status) -> None:
        """End the call with ``status``: raises an exception that only gRPC may catch."""
        self._aborted = True
        self.context.abort(status.code, status.details)

    def hold_more(self, nbytes: int) -> None:
        """Count ``nbytes`` beside the message until the call ends: of its answer, or of what it has in shared memory.
        Raises Overloaded for want of room."""
        if self._held is not None:
            self._held.hold_more(nbytes)

    def admit(self, client: str) -> bool:
        """Take a place for ``client``; False when the call is refused, which :meth:`_check_admitted` then says."""
        try:
            self._place = self._lane.door.enter(client)
        except RequestError as error:
            self._refused = error
        return self._refused is None

    def start(self, arrival: Arrival, submit: Callable[[], object], run: Callable[[], object]) -> None:
        """The call has its place. ``submit`` hands it to a thread, ``run`` runs it on this one, which is gRPC's own."""
        self._arrival = arrival
        arrival.when_ended(self._ended)
        self._hand_over(arrival, submit)

    def _hand_over(self, arrival: Arrival, submit: Callable[[], object]) -> None:
        """To a thread. Where there is none, because the server has stopped or the system is out of them, the call is
        cancelled: an exception would end gRPC's own thread."""
        try:
            submit()
        except RuntimeError:
            self.give_up(arrival)

    def give_up(self, arrival: Arrival) -> None:
        """The call will not run."""
        self._ended()
        arrival.cancel()

    def _check_admitted(self, context: grpc.ServicerContext) -> Place:
        """On the call's own thread, first of all. Raises what the call is refused for, or Cancelled when it is over."""
        self.context = context
        if self._refused is None and self._place is None:  # nobody could say yet whose it is
            self.admit(context.peer())
        if self._refused is not None or self._place is None:
            # Also where there is a place by now: this may be gRPC's own thread, which must not wait for a request.
            raise self._refused or Unavailable("the call was not let in")
        if self._arrival is None and not context.add_callback(self._ended):  # it ended before this thread came to it
            self._ended()
        self._check_wanted()
        return self._place

    def _check_wanted(self) -> None:
        """Raises Cancelled or DeadlineExceeded when nobody waits for the response any more."""
        if self._over:
            raise Cancelled("the client left before its request was read")
        if self.context.time_remaining() <= 0:
            raise DeadlineExceeded("the deadline passed before the request was read")

    def _ended(self) -> None:
        """gRPC has nothing left to do for the call."""
        self._over = True
        self.cancellation.cancel()
        self._lane.receiving.done(self)
        self._lane.sending.done(self)
        if self._place is not None:
            self._place.leave()

    def _waits(self, patience: Patience, end: Callable[[], None]) -> None:
        """Start the clock for this client. Where the call has ended, :meth:`_ended` has run and will not stop it."""
        patience.begin(self, end)
        if self._over:
            patience.done(self)

    def _expire(self) -> None:
        """The client has kept the server waiting for too long."""
        self._lane.refused("too_slow")
        (self._arrival or self.context).cancel()

    def _parsed(self, data: bytes, held: Held) -> Message:
        """The message, its bytes counted. Large ones are read one at a time: meanwhile the client may have left."""

        def hold(nbytes: int) -> None:
            self._check_wanted()
            held.hold(nbytes)

        return self._rpc.parsed(data, hold)


class OneRequest(Call):
    """A call of which one request is read: before it has a thread, where gRPC lets us."""

    def __init__(self, rpc: Rpc, lane: Lane) -> None:
        super().__init__(rpc, lane)
        self._data: bytes | None = None

    def start(self, arrival: Arrival, submit: Callable[[], object], run: Callable[[], object]) -> None:
        if not self._rpc.reads:
            return super().start(arrival, submit, run)
        self._arrival = arrival
        arrival.when_ended(self._ended)
        self._waits(self._lane.receiving, self._expire)
        return arrival.read(self.received, lambda: self._answer(arrival, submit, run))

    def _answer(self, arrival: Arrival, submit: Callable[[], object], run: Callable[[], object]) -> None:
        """The request is there: where its model is idle and quick, another thread would only be late."""
        if self._rpc.claim is not None and self._data is not None and len(self._data) <= _SMALL:
            self.claimed = self._rpc.claim(self._data)
        if self.claimed is None:
            self._hand_over(arrival, submit)
            return
        try:
            run()
        finally:
            self.claimed.give_back()

    def received(self, data: bytes) -> bytes:
        """gRPC's thread has the whole message. It is parsed on the call's own."""
        self._data = data
        self._lane.receiving.done(self)
        return data

    def _receive(self, messages: Iterator[bytes], place: Place) -> Message:
        if self._arrival is None:
            self._waits(self._lane.receiving, self._expire)
            self._data = next(messages, None)
        data, self._data = self._data, None
        if data is None:
            raise InvalidRequest("the call ended without a request")
        self._held = Held(place)
        self.nbytes = len(data)
        return self._parsed(data, self._held)


class UnaryCall(OneRequest):
    """A behavior for gRPC: one request, one response."""

    def __call__(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        try:
            place = self._check_admitted(context)
            response = self._rpc.answer(self._receive(messages, place) if self._rpc.reads else None, self)
        except grpc.RpcError:  # gRPC's own: the client has left
            raise
        except Exception as error:  # noqa: BLE001 -- the table decides what the client may know
            response = self._lane.status(error)
        if isinstance(response, Status):
            self.abort(response)
        self._waits(self._lane.sending, self._expire)  # until it has ended: the client may not read
        return response


class WatchCall(OneRequest):
    """A behavior for gRPC: one request, and responses that others send when there is something to say."""

    experimental_non_blocking = True  # gRPC's name: the thread is free once the answer returns

    def __call__(self, messages: Iterator[bytes], context: grpc.ServicerContext, send: Callable[[Any], None]) -> None:
        try:
            place = self._check_admitted(context)
            self._rpc.answer(self._receive(messages, place), self, self._sender(send))
        except grpc.RpcError:
            raise
        except Exception as error:  # noqa: BLE001 -- as above
            self.abort(self._lane.status(error))

    def _sender(self, send: Callable[[Any], None]) -> Callable[[Any], None]:
        """``send`` blocks for as long as the client does not read."""

        def send_in_time(response: Any) -> None:
            self._waits(self._lane.sending, self._expire)
            send(response)
            self._lane.sending.done(self)

        return send_in_time
