"""Schedules streams' requests: each model and each connection gets its share of the threads that answer them.

A request beyond its share would be rejected outside of a stream. Here it waits, and its stream is not read meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from service.transport.admission import Shares

Q = TypeVar("Q")


class _Turn:
    """A request that waits until ``over`` is set. It is then ``granted``, or its stream has ended."""

    __slots__ = ("client", "granted", "model", "over")

    def __init__(self, model: str, client: str) -> None:
        self.model = model
        self.client = client
        self.granted = False
        self.over = threading.Event()


class Turns:
    """Admits at most ``limit`` requests at a time, within each model's and each connection's
    :class:`~service.transport.admission.Shares`."""

    def __init__(self, limit: int) -> None:
        self.lock = threading.Lock()
        self._models = Shares(limit)
        self._clients = Shares(limit)
        self._waiting: list[_Turn] = []  # in order of arrival

    def take(self, model: str, client: str) -> bool:
        """Take a place if there is one. The caller holds the lock, here and in all methods below."""
        return self._take(model, client, set())

    def give(self, model: str, client: str) -> None:
        """Give a place back, to the first waiting request that may have it.

        Thus no later request overtakes one that could run.
        """
        self._models.give(model)
        self._clients.give(client)
        if self._waiting:
            full: set[str] = set()  # models at their share until another place is given back: asked once
            self._waiting = [turn for turn in self._waiting if turn.model in full or not self._grant(turn, full)]

    def wait(self, turn: _Turn) -> None:
        self._waiting.append(turn)

    def forget(self, turn: _Turn) -> None:
        if not turn.granted:
            self._waiting.remove(turn)
            turn.over.set()

    def _grant(self, turn: _Turn, full: set[str]) -> bool:
        if not self._take(turn.model, turn.client, full):
            return False
        turn.granted = True
        turn.over.set()
        return True

    def _take(self, model: str, client: str, full: set[str]) -> bool:
        """Take a place of both the client and the model, or of neither.

        A model that has its share is added to ``full``.
        """
        if not self._clients.take(client):
            return False
        if not self._models.take(model):
            self._clients.give(client)
            full.add(model)
            return False
        return True


class Line:
    """The requests of one stream, which take their turns one after the other."""

    def __init__(self, turns: Turns, client: str) -> None:
        self._turns = turns
        self._client = client
        self._closed = False
        self._last: _Turn | None = None

    def in_turn(self, requests: Iterable[Q], model: Callable[[Q], str]) -> Iterator[Q]:
        """Yield each request once it may run. :meth:`leave` must follow each. Ends when the line is closed."""
        for request in requests:
            if not self._enter(model(request)):
                return
            yield request

    def leave(self, model: str) -> None:
        """Give an answered request's place back."""
        with self._turns.lock:
            self._turns.give(model, self._client)

    def close(self) -> None:
        """End the wait of a pending request, which will not be answered because its stream has ended."""
        with self._turns.lock:
            if not self._closed and self._last is not None:
                self._turns.forget(self._last)
            self._closed = True

    def _enter(self, model: str) -> bool:
        with self._turns.lock:
            if self._closed:
                return False
            if self._turns.take(model, self._client):
                return True
            turn = self._last = _Turn(model, self._client)
            self._turns.wait(turn)
        turn.over.wait()
        return turn.granted
