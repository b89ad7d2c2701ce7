"""Schedules streams' requests: each model and each connection gets its share of the threads that answer them.

A request beyond its share would be rejected outside of a stream. Here it waits, and its stream is not read meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from service.grpc.admission import Shares

Q = TypeVar("Q")


class _Turn:
    """A request that waits until ``decided`` is set. It is then ``granted``, or its stream has ended."""

    __slots__ = ("client", "decided", "granted", "model")

    def __init__(self, model: str, client: str) -> None:
        self.model = model
        self.client = client
        self.granted = False
        self.decided = threading.Event()


class StreamScheduler:
    """Admits at most ``limit`` requests at a time, within each model's and each connection's
    :class:`~service.grpc.admission.Shares`."""

    def __init__(self, limit: int) -> None:
        self.lock = threading.Lock()
        self._models = Shares(limit)
        self._clients = Shares(limit)
        self._waiting: list[_Turn] = []  # in order of arrival

    def acquire(self, model: str, client: str) -> bool:
        """Acquire a place if there is one. The caller holds the lock, here and in all methods below."""
        return self._acquire(model, client, set())

    def release(self, model: str, client: str) -> None:
        """Release a place, to the first waiting request that may have it.

        Thus no later request overtakes one that could run.
        """
        self._models.release(model)
        self._clients.release(client)
        if self._waiting:
            full: set[str] = set()  # models at their share until another place is released: asked once
            self._waiting = [turn for turn in self._waiting if turn.model in full or not self._grant(turn, full)]

    def enqueue(self, turn: _Turn) -> None:
        self._waiting.append(turn)

    def remove(self, turn: _Turn) -> None:
        if not turn.granted:
            self._waiting.remove(turn)
            turn.decided.set()

    def _grant(self, turn: _Turn, full: set[str]) -> bool:
        if not self._acquire(turn.model, turn.client, full):
            return False
        turn.granted = True
        turn.decided.set()
        return True

    def _acquire(self, model: str, client: str, full: set[str]) -> bool:
        """Acquire a place of both the client and the model, or of neither.

        A model that has its share is added to ``full``.
        """
        if not self._clients.acquire(client):
            return False
        if not self._models.acquire(model):
            self._clients.release(client)
            full.add(model)
            return False
        return True


class StreamTurns:
    """The requests of one stream, which take their turns one after the other."""

    def __init__(self, scheduler: StreamScheduler, client: str) -> None:
        self._scheduler = scheduler
        self._client = client
        self._closed = False
        self._last_turn: _Turn | None = None

    def admitted(self, requests: Iterable[Q], model: Callable[[Q], str]) -> Iterator[Q]:
        """Yield each request once it may run. :meth:`release` must follow each. Ends when this is closed."""
        for request in requests:
            if not self._wait_for_turn(model(request)):
                return
            yield request

    def release(self, model: str) -> None:
        """Release the place of a request that has its response."""
        with self._scheduler.lock:
            self._scheduler.release(model, self._client)

    def close(self) -> None:
        """End the wait of a pending request, which will not be answered because its stream has ended."""
        with self._scheduler.lock:
            if not self._closed and self._last_turn is not None:
                self._scheduler.remove(self._last_turn)
            self._closed = True

    def _wait_for_turn(self, model: str) -> bool:
        with self._scheduler.lock:
            if self._closed:
                return False
            if self._scheduler.acquire(model, self._client):
                return True
            turn = self._last_turn = _Turn(model, self._client)
            self._scheduler.enqueue(turn)
        turn.decided.wait()
        return turn.granted
