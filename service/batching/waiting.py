"""A request, the thread that waits for its outcome, and why it may end before it has run."""

from __future__ import annotations

import threading
from typing import Literal

from bf16kit.errors import Cancelled, DeadlineExceeded, RequestError
from service.contract import Reply, Request

TOO_LATE = "the deadline passed before the request ran"
LEFT = "the client left before the request ran"


class Waiting:
    """A request that waits. ``done`` is held from the start; releasing it wakes the one thread that waits."""

    __slots__ = ("_done", "_error", "_reply", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self._reply: Reply | None = None
        self._error: Exception | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def succeed(self, reply: Reply) -> None:
        self._reply = reply
        self._done.release()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._done.release()

    def wait(self, timeout: float) -> bool:
        """Whether the outcome is there, after at most ``timeout`` seconds (−1: no limit)."""
        return self._done.acquire(timeout=timeout)

    def result(self) -> Reply:
        if self._error is not None:
            raise self._error
        if self._reply is None:
            raise RuntimeError("a call ended with neither a reply nor an error")
        return self._reply


def why_over(request: Request, now: float) -> RequestError | None:
    """Why this request must not run any more; None when it may."""
    if request.deadline is not None and request.deadline <= now:
        return DeadlineExceeded(TOO_LATE)
    if request.cancellation is not None and request.cancellation.cancelled:
        return Cancelled(LEFT)
    return None


def word(error: RequestError) -> Literal["deadline", "cancelled"]:
    """What the metrics call a request that ended so."""
    return "deadline" if isinstance(error, DeadlineExceeded) else "cancelled"
