"""The RPCs without a gRPC server, for a caller that has the messages' bytes, such as another system's proxy.

The same servicers answer, behind the same limits and checks. The caller is responsible for what gRPC does for a
connection: timeouts for slow clients, keepalive and TLS.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import grpc

from bf16kit.messages.errors import Cancelled, DeadlineExceeded, RequestError
from service.contract import Registry
from service.grpc.admission import Admission, CallBytes, Place
from service.grpc.call import Rpc
from service.grpc.claims import ClaimedModel
from service.grpc.credentials import Access, Metadata, RequiredScope
from service.grpc.handlers import Lanes, Opener
from service.grpc.lane import refusal_reason
from service.grpc.options import TransportOptions
from service.grpc.services import Services
from service.grpc.status import Status
from service.grpc.streamcall import StreamRequest
from service.operations import Operations
from service.request import Cancellation, Tracer

Kind = Literal["unary", "stream", "watch"]
DirectResponse = bytes | Status  # the serialised response, or the status instead
ErrorToStatus = Callable[[Exception], Status]


class DirectCall:
    """One call. The RPC uses it as a :class:`~service.grpc.callcontext.CallContext`.

    The caller uses one of :meth:`respond`, :meth:`respond_stream` and :meth:`watch`, according to :attr:`kind`, on a
    thread that may block. It calls :meth:`end`, from any thread, when the client has left or has everything.
    """

    def __init__(
        self, rpc: Rpc, admission: Admission, to_status: ErrorToStatus, max_bytes: int, metadata: Metadata
    ) -> None:
        self.started = time.monotonic()
        self.cancellation = Cancellation()
        self.claimed: ClaimedModel | None = None
        self.nbytes = 0
        self.metadata = metadata
        self.client = ""
        self.deadline: float | None = None
        self._rpc = rpc
        self._admission = admission
        self._to_status = to_status
        self._max_bytes = max_bytes
        self._place: Place | None = None
        self._call_bytes: CallBytes | None = None

    @property
    def kind(self) -> Kind:
        return self._rpc.kind

    @property
    def streams(self) -> bool:
        return self._rpc.kind == "stream"

    def metadata_value(self, key: str) -> str | bytes | None:
        return next((value for name, value in self.metadata or () if name == key), None)

    def reserve_more(self, nbytes: int) -> None:
        if self._call_bytes is not None:
            self._call_bytes.reserve_more(nbytes)

    # --- for the caller -----------------------------------------------------------------------------------------------

    def admit(self, client: str, deadline: float | None) -> Status | None:
        """Acquire a place for ``client``, first of all. Return the status that rejects the call if there is none.

        ``deadline`` is in :func:`time.monotonic` seconds.
        """
        self.client, self.deadline = client, deadline
        try:
            self._place = self._admission.admit(client)
        except RequestError as error:
            return self._to_status(error)
        return None

    def respond(self, data: bytes) -> DirectResponse:
        """Respond to a unary RPC. Never raises."""
        try:
            return self._serialized(self._rpc.handler(self._message(data), self))
        except Exception as error:  # noqa: BLE001 -- the table decides what the client may know
            return self._to_status(error)

    def respond_stream(self, messages: Iterator[bytes]) -> Iterator[DirectResponse]:
        """Respond to a streaming RPC. A status is the last item.

        An item counts as received when the next is requested.
        """
        call_bytes: list[CallBytes] = []
        try:
            for response in self._rpc.handler(self._requests(messages, call_bytes), self):
                yield self._serialized(response)
                if isinstance(response, Status):
                    return
                call_bytes.pop(0).release()
        except Exception as error:  # noqa: BLE001 -- as above
            yield self._to_status(error)

    def watch(self, data: bytes, send: Callable[[DirectResponse | None], None]) -> None:
        """Respond to a watch, whose responses come at each change. ``send`` must not block; it gets None at the end."""
        try:
            self._rpc.handler(
                self._message(data),
                self,
                lambda response: send(None if response is None else self._rpc.serialize(response)),
            )
        except Exception as error:  # noqa: BLE001 -- as above
            send(self._to_status(error))

    def end(self) -> None:
        """Release everything: no client waits for the call any more. May be called repeatedly."""
        self.cancellation.cancel()
        if self._place is not None:
            self._place.release()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _serialized(self, response: Any) -> DirectResponse:
        return response if isinstance(response, Status) else self._rpc.serialize(response)

    def _message(self, data: bytes) -> Any:
        if not self._rpc.reads_request:
            return None
        self._call_bytes = self._new_call_bytes()
        self.nbytes = len(data)
        return self._parse(data, self._call_bytes)

    def _requests(self, messages: Iterator[bytes], call_bytes: list[CallBytes]) -> Iterator[StreamRequest]:
        for data in messages:
            call_bytes.append(self._new_call_bytes())
            arrived = time.monotonic()
            yield StreamRequest(self._parse(data, call_bytes[-1]), arrived, call_bytes[-1].reserve_more)

    def _new_call_bytes(self) -> CallBytes:
        assert self._place is not None  # noqa: S101 -- whoever brings a call lets it enter first
        return CallBytes(self._place)

    def _parse(self, data: bytes, call_bytes: CallBytes) -> Any:
        if len(data) > self._max_bytes:
            raise _TooLarge(len(data), self._max_bytes)

        def reserve(nbytes: int) -> None:
            if self.cancellation.cancelled:
                raise Cancelled("the client left before its request was read")
            call_bytes.reserve(nbytes)

        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise DeadlineExceeded("the deadline passed before the request was read")
        return self._rpc.parsed(data, reserve)


class _TooLarge(Exception):
    """A message over the limit. gRPC's servers reject it before any handler sees it, always with this code."""

    def __init__(self, nbytes: int, most: int) -> None:
        super().__init__()
        self.status = too_large(nbytes, most)


def too_large(nbytes: int, most: int) -> Status:
    """Return the status for a message of ``nbytes``, where ``most`` is ``max_message_bytes``."""
    return Status(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the message has {nbytes} bytes; max_message_bytes is {most}")


class _DirectLane:
    """A :class:`service.grpc.handlers.LaneProtocol` without gRPC."""

    def __init__(
        self, admission: Admission, services: Services, count_refusal: Callable[[str], None], max_bytes: int
    ) -> None:
        self._admission = admission
        self._services = services
        self._count_refusal = count_refusal
        self._max_bytes = max_bytes

    def open(self, rpc: Rpc, required: RequiredScope, metadata: Metadata) -> DirectCall | Status:
        try:
            required.check(metadata)
        except RequestError as error:
            return self._status(error)
        return DirectCall(rpc, self._admission, self._status, self._max_bytes, metadata)

    def reject(self, error: RequestError, required: RequiredScope, metadata: Metadata) -> DirectCall | Status:
        try:
            required.check(metadata)
        except RequestError as forbidden:
            error = forbidden
        return self._status(error)

    def _status(self, error: Exception) -> Status:
        if isinstance(error, _TooLarge):
            return error.status
        if reason := refusal_reason(error):
            self._count_refusal(reason)
        return self._services.statuses.for_error(error)


class DirectTransport:
    """All RPCs of a server, by path.

    ``threads`` and ``streams`` are pools for callers that wait for responses: with a thread for each call that is
    admitted.
    """

    def __init__(
        self,
        registry: Registry,
        count_refusal: Callable[[str], None],
        options: TransportOptions,
        access: Access = Access(),  # noqa: B008 -- frozen: everybody may call everything
        operations: Operations = Operations(),  # noqa: B008 -- frozen: nothing but inference and looking
        tracer: Tracer | None = None,
    ) -> None:
        self._services = services = Services(registry, count_refusal, options, access, operations, tracer)

        def lane(admission: Admission) -> _DirectLane:
            return _DirectLane(admission, services, count_refusal, options.max_message_bytes)

        self._openers: dict[str, Opener[DirectCall | Status]] = services.openers(
            Lanes(
                inference=lane(services.inference),
                streams=lane(services.streams),
                control=lane(services.control),
                changes=lane(services.changes),
                watches=lane(services.watches),
                reflection=lane(services.reflection),
            )
        )
        admissions = (services.inference, services.control, services.changes)
        self.threads: ThreadPoolExecutor = services.pool("direct", sum(map(services.threads_for, admissions)))
        streaming = (services.streams, services.reflection)
        self.streams: ThreadPoolExecutor = services.pool("direct-stream", sum(map(services.threads_for, streaming)))

    @property
    def paths(self) -> tuple[str, ...]:
        """The known paths, ``/package.Service/Method``."""
        return tuple(self._openers)

    def open(self, path: str, metadata: Metadata, client: str, deadline: float | None) -> DirectCall | Status:
        """Return an admitted call, or the status that rejects it. KeyError for an unknown path.

        ``client`` identifies the party that shares the server's places with others. ``deadline`` is in
        :func:`time.monotonic` seconds.
        """
        call = self._openers[path](metadata)
        if isinstance(call, Status):
            return call
        return call.admit(client, deadline) or call

    def stop(self, grace: float) -> bool:
        """Reject new calls and let those in flight finish. Return False if some did not within ``grace`` seconds."""
        until = time.monotonic() + grace
        self._services.drain(until)
        completed = self._services.wait_empty(until)
        self._services.close()
        return completed
