"""Whose requests of streams are at work: each model and each connection has its share of the threads that answer them.

A request that would be refused for that outside of a stream waits here, and its stream is read no further.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from service.transport.admission import Shares

Q = TypeVar("Q")


class _Turn:
    """A request that waits: until ``over``, and then it is ``granted`` or its stream has ended."""

    __slots__ = ("client", "granted", "model", "over")

    def __init__(self, model: str, client: str) -> None:
        self.model = model
        self.client = client
        self.granted = False
        self.over = threading.Event()


class Turns:
    """At most ``limit`` requests are at work; of these each model and each connection has its part of
    :class:`~service.transport.admission.Shares`.
    """

    def __init__(self, limit: int) -> None:
        self.lock = threading.Lock()
        self._models = Shares(limit)
        self._clients = Shares(limit)
        self._waiting: list[_Turn] = []  # in the order in which they came

    def take(self, model: str, client: str) -> bool:
        """Called with the lock held, as all that follow."""
        return self._take(model, client, set())

    def give(self, model: str, client: str) -> None:
        """To whoever waits first and may have it: so nobody who comes later overtakes one who could have gone."""
        self._models.give(model)
        self._clients.give(client)
        if self._waiting:
            full: set[str] = set()  # models that may have no more until somebody gives again: asked once
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
        """Of both or of neither; ``full`` is told of a model that has its share."""
        if not self._clients.take(client):
            return False
        if not self._models.take(model):
            self._clients.give(client)
            full.add(model)
            return False
        return True


class Line:
    """One stream's requests, which have their turns one after the other."""

    def __init__(self, turns: Turns, client: str) -> None:
        self._turns = turns
        self._client = client
        self._closed = False
        self._last: _Turn | None = None

    def in_turn(self, requests: Iterable[Q], model: Callable[[Q], str]) -> Iterator[Q]:
        """Each request once it may be at work: after it :meth:`leave` is to be called. Ends when the line is closed."""
        for request in requests:
            if not self._enter(model(request)):
                return
            yield request

    def leave(self, model: str) -> None:
        """A request is answered."""
        with self._turns.lock:
            self._turns.give(model, self._client)

    def close(self) -> None:
        """A request that waits does so no longer: it will not be answered, for its stream has ended."""
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
