"""A call of many requests: read no faster than their answers are taken."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from service.transport.admission import Held, Place
from service.transport.call import Call, Rpc
from service.transport.status import Status

if TYPE_CHECKING:
    from service.transport.lane import Lane

_READ_AHEAD_BYTES = 8 << 20  # of a stream's requests and answers: with more it reads on when a response was taken


class StreamRequest(NamedTuple):
    """One message of a stream. ``hold_more`` counts bytes for it, as :meth:`Call.hold_more` does."""

    message: Any
    hold_more: Callable[[int], None]


class StreamCall(Call):
    """A behavior for gRPC: many requests, many responses."""

    def __init__(self, rpc: Rpc, lane: Lane) -> None:
        super().__init__(rpc, lane)
        self._unanswered: deque[Held] = deque()  # in the order of the requests, which is that of the responses
        self._fewer = threading.Condition()

    def __call__(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            place = self._check_admitted(context)
            for response in self._rpc.answer(self._receive(messages, place), self):
                if isinstance(response, Status):
                    self.abort(response)
                self._waits(self._lane.sending, self._expire)
                yield response
                self._lane.sending.done(self)
                self._answered()
        except grpc.RpcError:
            raise
        except Exception as error:
            if self._aborted:
                raise
            self.abort(self._lane.status(error))

    def _receive(self, messages: Iterator[bytes], place: Place) -> Iterator[StreamRequest]:
        while True:
            self._wait_for_room(place)
            self._waits(self._lane.receiving, self._idle)
            data = next(messages, None)
            self._lane.receiving.done(self)
            if data is None:
                return
            held = Held(place)
            self._unanswered.append(held)
            yield StreamRequest(self._parsed(data, held), held.hold_more)

    def _wait_for_room(self, place: Place) -> None:
        """Read no further request while those that were read, and their answers, are too large: one alone may be."""
        with self._fewer:
            self._fewer.wait_for(lambda: self._over or place.nbytes < _READ_AHEAD_BYTES)

    def _answered(self) -> None:
        """The client has taken the response to the oldest request."""
        self._unanswered.popleft().release()
        with self._fewer:
            self._fewer.notify_all()

    def _ended(self) -> None:
        super()._ended()
        with self._fewer:
            self._fewer.notify_all()

    def _idle(self) -> None:
        """Nothing has come for long: no fault of the client's as long as it waits for responses."""
        if self._unanswered:
            self._waits(self._lane.receiving, self._idle)
        else:
            self._expire()
