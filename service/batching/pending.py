"""A waiting request, its result, and the reasons why it may end before it has run."""

from __future__ import annotations

import math
import threading
import time
from typing import Literal

from bf16kit.messages.errors import Cancelled, DeadlineExceeded, InputRefused, InvalidRequest, RequestError, Unavailable
from service.request import Reply, Request, Timings

TOO_LATE = "the deadline passed before the request ran"
CLIENT_LEFT = "the client left before the request ran"


class PendingRequest:
    """A request whose caller waits for the result.

    ``_done`` is locked from the start; releasing it wakes the one thread that waits.
    """

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

    def set_timings(self, arrived: float, left: float, started: float = 0.0, ended: float = 0.0) -> None:
        """Set the timings of a request that is about to fail: its queue time, and its run time if it has run."""
        queue, compute = max(0.0, left - arrived), ended - started
        self.request.timings = Timings(queue, compute_infer=compute, arrived=arrived, batch_started=started)

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds (−1: no limit); return whether the result is there."""
        return self._done.acquire(timeout=timeout)

    def result(self) -> Reply:
        if self._error is not None:
            raise self._error
        if self._reply is None:
            raise RuntimeError("a call ended with neither a reply nor an error")
        return self._reply


def unloading_error() -> Unavailable:
    """Return the error for requests that wait, or arrive, when the batcher is closed."""
    return Unavailable("the model is being unloaded; try again later", "draining")


def invalid_input_error(error: InputRefused) -> InvalidRequest:
    """Return the error for the client whose inputs the runtime has rejected."""
    return InvalidRequest(f"the model cannot run on these inputs: {error.reason}")


def lock_timeout(deadline: float) -> float:
    """Return the timeout in seconds for a lock that is waited for until ``deadline``; −1 = no limit."""
    return -1.0 if deadline == math.inf else min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)


def expiry_error(request: Request, now: float) -> RequestError | None:
    """Return the error for a request that must not run any more, or None if it may."""
    if request.deadline is not None and request.deadline <= now:
        return DeadlineExceeded(TOO_LATE)
    if request.cancellation is not None and request.cancellation.cancelled:
        return Cancelled(CLIENT_LEFT)
    return None


def rejection_label(error: RequestError) -> Literal["deadline", "cancelled", "draining"]:
    """Return the metrics' name for a request that ended with ``error``."""
    if isinstance(error, Unavailable):
        return "draining"
    return "deadline" if isinstance(error, DeadlineExceeded) else "cancelled"
