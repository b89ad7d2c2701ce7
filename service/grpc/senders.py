"""Threads that send to clients. A client that does not read does not delay those that do."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain

_MAX_PER_CLIENT = 2  # sends to one client at a time
_QueuedSend = tuple[Future[None], Callable[[], None]]


class Senders:
    """Runs sends in order for each client, at most two at a time per client.

    Clients take turns. Those that have read a message before come first.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._free = threads
        self._closed = False
        self._lock = threading.Lock()
        self._busy: Counter[str] = Counter()
        self._readers: dict[str, deque[_QueuedSend]] = {}
        self._others: dict[str, deque[_QueuedSend]] = {}

    @property
    def has_backlog(self) -> bool:
        """Whether a send waits for a thread, or for other sends to its client."""
        return bool(self._readers or self._others)

    def submit(self, client: str, send: Callable[[], None], *, reads: bool = False) -> Future[None]:
        """Queue ``send``, which must not raise. ``reads``: its client has read a message before.

        Raises RuntimeError after :meth:`shutdown`.
        """
        sent: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("nothing is sent any more")
            (self._readers if reads else self._others).setdefault(client, deque()).append((sent, send))
            if self._free and self._busy[client] < _MAX_PER_CLIENT:
                self._threads.submit(self._work)
                self._free -= 1
        return sent

    def shutdown(self, *, wait: bool) -> None:
        """Cancel the sends that wait."""
        with self._lock:
            self._closed = True
            for sent, _ in chain(*self._readers.values(), *self._others.values()):
                sent.cancel()
            self._readers, self._others = {}, {}
        self._threads.shutdown(wait=wait)

    def _work(self) -> None:
        while (queued_send := self._next()) is not None:
            client, sent, send = queued_send
            send()
            sent.set_result(None)
            with self._lock:
                self._busy[client] -= 1
                if not self._busy[client]:
                    del self._busy[client]

    def _next(self) -> tuple[str, Future[None], Callable[[], None]] | None:
        """Return the next send: of the first client below its limit, which then moves behind the others."""
        with self._lock:
            for waiting in (self._readers, self._others):
                client = next((client for client in waiting if self._busy[client] < _MAX_PER_CLIENT), None)
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
