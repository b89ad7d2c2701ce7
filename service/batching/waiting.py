"""A request and the thread that waits for its outcome."""

from __future__ import annotations

import threading

from service.contract import Reply, Request


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
