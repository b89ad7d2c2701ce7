"""Calls as gRPC delivers them, without gRPC: a test decides when a request arrives, and when its client leaves.

:class:`Arriving` has the methods of :class:`bf16kit.service.grpc.arrival.Arrival`. They run on the thread of the test,
as the real ones run on gRPC's own thread; only :meth:`Arriving.respond` and :meth:`Arriving.reject` may come from
others.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import grpc


class _Aborted(Exception):
    """Ends a behavior that has aborted its call."""


class Arriving:
    """One call of ``client``, whose deadline passes in ``remaining`` seconds.

    ``code`` is None until there is a response or an error. ``ended`` says that gRPC has nothing left to do.
    """

    def __init__(self, client: str, remaining: float) -> None:
        self.client = client
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.ended = False
        self.cancelled = False  # by the server
        self.responses = 0
        self._remaining = remaining
        self._callbacks: list[Callable[[], None]] = []
        self._receive: tuple[Callable[[bytes], bytes], Callable[[], None]] | None = None
        self._lock = threading.Lock()

    # --- what the server calls ----------------------------------------------------------------------------------------

    def time_remaining(self) -> float:
        return self._remaining

    def cancel(self) -> None:
        self.cancelled = True
        self.end()

    def respond(self, response: bytes) -> None:
        self._answer(grpc.StatusCode.OK, "")

    def reject(self, code: grpc.StatusCode, details: str) -> None:
        self._answer(code, details)

    def on_end(self, ended: Callable[[], None]) -> None:
        self._callbacks.append(ended)

    def read(self, on_message: Callable[[bytes], bytes], when_done: Callable[[], None]) -> None:
        self._receive = on_message, when_done

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        """Do what gRPC's context does with a behavior that rejects its call."""
        self._answer(code, details)
        raise _Aborted

    # --- what the client does -----------------------------------------------------------------------------------------

    @property
    def awaits_request(self) -> bool:
        return self._receive is not None and not self.ended

    def send(self, message: bytes) -> None:
        """Deliver the request."""
        assert self._receive is not None
        (on_message, when_done), self._receive = self._receive, None
        on_message(message)
        when_done()

    def end(self) -> None:
        """The client has read everything, or has left; or the server has cancelled the call."""
        with self._lock:
            if self.ended:
                return
            self.ended = True
        self._receive = None
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def behave(self, behavior: Callable[[Any, Any], Any]) -> None:
        """Run a behavior as gRPC does, on this call."""
        with contextlib.suppress(_Aborted):
            behavior(iter(()), self)

    def _answer(self, code: grpc.StatusCode, details: str) -> None:
        self.responses += 1
        self.code, self.details = code, details
