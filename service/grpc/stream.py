"""A call with many requests, answered in order, and read no faster than the client reads its responses."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import grpc

from bf16kit.service.grpc.admission import MessageBytes, Permit
from bf16kit.service.grpc.call import Call, Metadata, Rpc
from bf16kit.service.grpc.status import Status

# Limit on the bytes of a stream's requests and responses, above which reading pauses until a response is read.
_READ_AHEAD_BYTES = 8 << 20
Q = TypeVar("Q")
A = TypeVar("A")


class StreamRequest(NamedTuple):
    """One message of a stream, and when it arrived (:func:`time.monotonic` seconds).

    ``reserve_more`` counts bytes for it, like :meth:`bf16kit.service.grpc.call.Call.reserve_more`.
    """

    message: Any
    arrived: float
    reserve_more: Callable[[int], None]


class StreamCall(Call):
    """A behavior for gRPC: many requests, many responses."""

    def __init__(self, rpc: Rpc, metadata: Metadata) -> None:
        super().__init__(rpc, metadata)
        self._pending: deque[MessageBytes] = deque()  # in the order of the requests and responses
        self._bytes_released = threading.Condition()

    def __call__(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            permit = self._check()
            for response in self._rpc.handler(self._requests(messages, permit), self):
                if isinstance(response, Status):
                    self._abort(context, response)
                self._start_timeout(self._pool.send_timeouts, self._end_slow_call)
                yield response
                self._pool.send_timeouts.clear(self)
                self._pending.popleft().release()  # the client has read the response to the oldest request
                self._wake_reader()
        except grpc.RpcError:
            raise
        except Exception as error:
            if self._aborted:
                raise
            self._abort(context, self._status(error))

    def _requests(self, messages: Iterator[bytes], permit: Permit) -> Iterator[StreamRequest]:
        while True:
            with self._bytes_released:  # a single request may be larger
                self._bytes_released.wait_for(lambda: self._has_ended or permit.nbytes < _READ_AHEAD_BYTES)
            self._start_timeout(self._pool.receive_timeouts, self._on_idle)
            data = next(messages, None)
            self._pool.receive_timeouts.clear(self)
            if data is None:
                return
            arrived, held = time.monotonic(), MessageBytes(permit)
            self._pending.append(held)
            request = StreamRequest(self._parse(data, held), arrived, held.reserve_more)
            del data
            yield request
            del request  # an idle stream keeps none

    def _wake_reader(self) -> None:
        with self._bytes_released:
            self._bytes_released.notify_all()

    def _on_end(self) -> None:
        super()._on_end()
        self._wake_reader()

    def _on_idle(self) -> None:
        """Handle a stream without requests for long: end it, unless the client still waits for responses."""
        if self._pending:
            self._start_timeout(self._pool.receive_timeouts, self._on_idle)
        else:
            self._end_slow_call()


class OrderedResponses(Generic[Q, A]):
    """Iterates over the responses to ``requests`` in their order, with at most ``window`` of them in flight.

    A reader, on a thread of ``threads``, passes each request to ``begin``, with the function that takes its response.
    Earlier ones may be in flight then, so that they can share a batch. It stops reading while the window is full, so
    the transport's flow control holds the client back. The iteration ends with ``requests``, or, after :meth:`close`,
    once the requests read so far are answered.
    """

    def __init__(
        self, requests: Iterator[Q], begin: Callable[[Q, Callable[[A], None]], None], threads: Executor, window: int
    ) -> None:
        self._requests = requests
        self._begin = begin
        self._threads = threads
        self._room = threading.Semaphore(window)
        self._responses: SimpleQueue[Future[A] | None] = SimpleQueue()
        self._closed = False

    def __iter__(self) -> Iterator[A]:
        self._threads.submit(self._read)
        try:
            while (response := self._responses.get()) is not None:
                yield response.result()
                del response
                self._room.release()
        finally:
            self.close()

    def close(self) -> None:
        """Read no further request. A reader that waits for one stays until its ``requests`` end."""
        self._closed = True
        self._room.release()
        self._responses.put(None)

    def _read(self) -> None:
        try:
            while self._room.acquire() and not self._closed:
                request = next(self._requests, None)
                if request is None:
                    break
                response: Future[A] = Future()
                self._responses.put(response)  # first: begin() may wait, and a request that was read is answered
                self._begin(request, response.set_result)
                del request, response  # an idle stream keeps none
        except BaseException as error:  # noqa: BLE001 -- it belongs to the one who iterates
            failed: Future[A] = Future()
            failed.set_exception(error)
            self._responses.put(failed)
        self._responses.put(None)
