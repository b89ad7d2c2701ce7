"""Calls that wait for a load or unload they requested. The change continues even if they stop waiting."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

from bf16kit.messages.errors import Cancelled, DeadlineExceeded, Unavailable
from service.grpc.callcontext import CallContext

# Part of the call's remaining time, in seconds and as a share, that is left for its client to read the outcome.
_RESPONSE_S, _RESPONSE_PART = 0.25, 0.1


class Changes:
    """Lets calls wait for changes. :meth:`drain` ends all waiting, so that a stop does not wait for a model to load."""

    def __init__(self) -> None:
        self._waiting: set[threading.Event] = set()
        self._draining = False

    def drain(self) -> None:
        self._draining = True
        for woken in tuple(self._waiting):
            woken.set()

    def wait(self, change: Future[None], call: CallContext, doing: str) -> None:
        """Return when ``change`` is done, or raise its error.

        The deadline, a client that leaves and a server that stops end the wait, but not the change.
        """
        woken = threading.Event()
        self._waiting.add(woken)
        change.add_done_callback(lambda _: woken.set())
        call.cancellation.subscribe(woken.set)
        try:
            if not self._draining:
                woken.wait(_wait_seconds(call.deadline))
            if change.done():
                return change.result()
            if self._draining:
                raise Unavailable("the server is shutting down; try another", "draining")
            if call.cancellation.cancelled:
                raise Cancelled(f"the client left before {doing} was done; it continues")
            raise DeadlineExceeded(f"{doing} takes longer than the call's deadline; it continues: see RepositoryIndex")
        finally:
            call.cancellation.unsubscribe(woken.set)
            self._waiting.discard(woken)


def _wait_seconds(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    remaining = deadline - time.monotonic()
    return max(0.0, remaining - min(_RESPONSE_S, _RESPONSE_PART * remaining))
