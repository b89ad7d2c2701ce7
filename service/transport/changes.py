"""Calls that wait for a change of the models which was asked for, and goes on whether or not they wait."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

from bf16kit.errors import Cancelled, DeadlineExceeded, Unavailable
from service.transport.calling import Calling

_LAST_WORDS_S, _LAST_PART = 0.25, 0.1  # of the time that a call has: for its client to read what became of it


class Changes:
    """:meth:`drain` ends all waiting: a stop does not wait for a model that is being loaded."""

    def __init__(self) -> None:
        self._waiting: set[threading.Event] = set()
        self._draining = False

    def drain(self) -> None:
        self._draining = True
        for woken in tuple(self._waiting):
            woken.set()

    def wait(self, change: Future[None], call: Calling, doing: str) -> None:
        """Return when ``change`` is made; raise what it failed with. The deadline, a client that leaves and a server
        that stops end the wait, and not the change."""
        woken = threading.Event()
        self._waiting.add(woken)
        change.add_done_callback(lambda _: woken.set())
        call.cancellation.subscribe(woken.set)
        try:
            if not self._draining:
                woken.wait(_patience(call.deadline))
            if change.done():
                return change.result()
            if self._draining:
                raise Unavailable("the server is shutting down; try another", "draining")
            if call.cancellation.cancelled:
                raise Cancelled(f"the client left before {doing} was over; it goes on")
            raise DeadlineExceeded(f"{doing} takes longer than the call's deadline; it goes on: see RepositoryIndex")
        finally:
            call.cancellation.unsubscribe(woken.set)
            self._waiting.discard(woken)


def _patience(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    return max(0.0, left - min(_LAST_WORDS_S, _LAST_PART * left))
