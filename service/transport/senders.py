"""Threads that send to clients who may not read, so that those hold up nobody who does."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain

_AT_ONCE = 2  # of one client
_Sending = tuple[Future[None], Callable[[], None]]


class Senders:
    """Runs what is to be sent to each client in its order, two at once at most. The clients take turns: first those who
    have been seen to read.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._free = threads
        self._closed = False
        self._lock = threading.Lock()
        self._busy: Counter[str] = Counter()
        self._readers: dict[str, deque[_Sending]] = {}
        self._others: dict[str, deque[_Sending]] = {}

    @property
    def waited_for(self) -> bool:
        """Whether something waits for a thread, or for others of its client."""
        return bool(self._readers or self._others)

    def submit(self, client: str, send: Callable[[], None], *, reads: bool = False) -> Future[None]:
        """``send`` must not raise; ``reads``: who gets it has read before.

        Raises RuntimeError once :meth:`shutdown` has been called.
        """
        sent: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("nothing is sent any more")
            (self._readers if reads else self._others).setdefault(client, deque()).append((sent, send))
            if self._free and self._busy[client] < _AT_ONCE:
                self._threads.submit(self._work)
                self._free -= 1
        return sent

    def shutdown(self, *, wait: bool) -> None:
        """What waits is not sent any more."""
        with self._lock:
            self._closed = True
            for sent, _ in chain(*self._readers.values(), *self._others.values()):
                sent.cancel()
            self._readers, self._others = {}, {}
        self._threads.shutdown(wait=wait)

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            client, sent, send = taken
            send()
            sent.set_result(None)
            with self._lock:
                self._busy[client] -= 1
                if not self._busy[client]:
                    del self._busy[client]

    def _next(self) -> tuple[str, Future[None], Callable[[], None]] | None:
        """What is to be sent next: of the first client that may send more, which then goes behind the others."""
        with self._lock:
            for waiting in (self._readers, self._others):
                client = next((client for client in waiting if self._busy[client] < _AT_ONCE), None)
                if client is not None:
                    break
            else:
                self._free += 1
                return None
            own = waiting.pop(client)
            sent, send = own.popleft()
            if own:
                waiting[client] = own
            self._busy[client] += 1
            return client, sent, send
