"""A call with many requests, which is read no faster than the client reads its responses."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from service.grpc.admission import CallBytes, Place
from service.grpc.call import Call, Rpc
from service.grpc.status import Status

if TYPE_CHECKING:
    from service.grpc.lane import Lane

# Limit on the bytes of a stream's requests and responses, above which reading pauses until a response is read.
_READ_AHEAD_BYTES = 8 << 20


class StreamRequest(NamedTuple):
    """One message of a stream, and when it arrived (:func:`time.monotonic` seconds).

    ``reserve_more`` counts bytes for it, like :meth:`Call.reserve_more`.
    """

    message: Any
    arrived: float
    reserve_more: Callable[[int], None]


class StreamCall(Call):
    """A behavior for gRPC: many requests, many responses."""

    def __init__(self, rpc: Rpc, lane: Lane) -> None:
        super().__init__(rpc, lane)
        self._pending_bytes: deque[CallBytes] = deque()  # in the order of the requests and responses
        self._bytes_released = threading.Condition()

    def __call__(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            place = self._check_admitted(context)
            for response in self._rpc.handler(self._receive(messages, place), self):
                if isinstance(response, Status):
                    self.abort(response)
                self._start_timeout(self._lane.send_timeouts, self._end_slow_call)
                yield response
                self._lane.send_timeouts.clear(self)
                self._release_oldest()
        except grpc.RpcError:
            raise
        except Exception as error:
            if self._aborted:
                raise
            self.abort(self._lane.status(error))

    def _receive(self, messages: Iterator[bytes], place: Place) -> Iterator[StreamRequest]:
        while True:
            self._wait_for_room(place)
            self._start_timeout(self._lane.receive_timeouts, self._on_idle)
            data = next(messages, None)
            self._lane.receive_timeouts.clear(self)
            if data is None:
                return
            arrived = time.monotonic()
            call_bytes = CallBytes(place)
            self._pending_bytes.append(call_bytes)
            yield StreamRequest(self._parse(data, call_bytes), arrived, call_bytes.reserve_more)

    def _wait_for_room(self, place: Place) -> None:
        """Wait while the pending requests and their responses are too large. A single one may be."""
        with self._bytes_released:
            self._bytes_released.wait_for(lambda: self._has_ended or place.nbytes < _READ_AHEAD_BYTES)

    def _release_oldest(self) -> None:
        """Release the oldest request: the client has read its response."""
        self._pending_bytes.popleft().release()
        with self._bytes_released:
            self._bytes_released.notify_all()

    def _on_end(self) -> None:
        super()._on_end()
        with self._bytes_released:
            self._bytes_released.notify_all()

    def _on_idle(self) -> None:
        """Handle a stream without requests for long: end it, unless the client still waits for responses."""
        if self._pending_bytes:
            self._start_timeout(self._lane.receive_timeouts, self._on_idle)
        else:
            self._end_slow_call()
