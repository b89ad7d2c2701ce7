"""Answers a stream's requests in order, several in flight at once so that they can share a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class OrderedResponses(Generic[Q, A]):
    """Iterates over ``respond(request)`` in the order of ``requests``, with at most ``window`` of them in flight.

    A reader, on a thread of ``readers``, takes the next request while earlier ones run on threads of ``workers``. It
    stops reading while the window is full, so the transport's flow control holds the client back. The iteration ends
    with ``requests``, or, after :meth:`close`, once the requests read so far are answered.
    """

    def __init__(
        self,
        requests: Iterator[Q],
        respond: Callable[[Q], A],
        readers: Executor,
        workers: Executor,
        window: int,
    ) -> None:
        self._requests = requests
        self._respond = respond
        self._readers = readers
        self._workers = workers
        self._room = threading.Semaphore(window)
        self._responses: SimpleQueue[Future[A] | None] = SimpleQueue()
        self._closed = False

    def __iter__(self) -> Iterator[A]:
        self._readers.submit(self._read)
        try:
            while (response := self._responses.get()) is not None:
                yield response.result()
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
                self._responses.put(self._workers.submit(self._respond, request))
        except BaseException as error:  # noqa: BLE001 -- it belongs to the one who iterates
            failed: Future[A] = Future()
            failed.set_exception(error)
            self._responses.put(failed)
        self._responses.put(None)
