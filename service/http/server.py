"""The HTTP port: metrics and probes for machines, the status page for people. No inference here.

One thread with an event loop holds every connection, so hundreds of silent ones cost no threads; docs/decisions
explains the choice of h11 on asyncio. Connections are limited: when there is no room, the one that has been silent
longest is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any

from service.config import ports
from service.config.certificates import CertificateFiles
from service.http.connection import HttpConnection, HttpRequest, Limits
from service.http.pages import Access, Page, Routes, text
from service.http.rendering import PageRenderer

_log = logging.getLogger(__name__)
_BACKLOG = 1024  # connections held by the system until they are accepted
_SEND_BUFFER = 128 << 10  # bytes of a response held by the system for a client that does not read
# Requests that the loop begins to answer in one turn. The renderer bounds the pages that are rendered at a time, and a
# probe that is its connection's first request goes ahead.
_REQUESTS_PER_TURN = 16
# Connections accepted in a row. Reading and answering a probe takes seven turns of the loop: connections that come
# later must not delay it.
_ACCEPT_BURST = 8
_PAUSE_SECONDS = 0.05  # before accepting again when there are no file descriptors left
_WARNING_INTERVAL_SECONDS = 60.0


class HttpServer:
    """The HTTP server. The constructor binds, so that a port in use shows before any load; :meth:`start` serves.

    ``on_refused`` is called with the reason of each rejection, on the server's thread. Raises :class:`ConfigError` if
    the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        pages: Routes,
        *,
        limits: Limits | None = None,
        access: Access | None = None,
        certificates: CertificateFiles | None = None,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._listener = _listen(host, port)
        self._pages = pages
        self._limits = limits or Limits()
        self._access = access or Access()
        self._certificates = certificates
        self._on_refused = on_refused
        self._renderer = PageRenderer(pages)
        self._open: dict[HttpConnection, asyncio.Task[None]] = {}
        self._turn = asyncio.Semaphore(_REQUESTS_PER_TURN)
        self._last_warning = -_WARNING_INTERVAL_SECONDS
        self._stop: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End every connection and the thread."""
        if self._thread.ident is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop, stop = self._stop.result()
                loop.call_soon_threadsafe(stop.set)
            self._thread.join()
        self._renderer.close()
        self._listener.close()

    # --- the loop's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:  # noqa: BLE001 -- the last thing this thread can do is say so
            _log.exception("the HTTP port has ended")
        finally:
            if not self._stop.done():
                self._stop.set_exception(RuntimeError("the loop never ran"))

    async def _serve(self) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(_unexpected)
        self._listener.setblocking(False)
        accepting = loop.create_task(self._accept())
        accepting.add_done_callback(lambda _: stop.set())
        self._stop.set_result((loop, stop))
        await stop.wait()
        if accepting.done():
            accepting.result()  # raises the exception that ended it

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for count in itertools.count(1):
            try:
                peer, _ = await loop.sock_accept(self._listener)
            except ConnectionAbortedError:
                continue  # the client left before it was accepted
            except OSError as error:  # most likely no file descriptor is left
                self._make_room(f"connections cannot be accepted: {error.strerror}")
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if len(self._open) >= self._limits.connections:
                self._make_room(f"it has {len(self._open)} connections, its limit")
            self._start_connection(peer)
            if count % _ACCEPT_BURST == 0:
                await asyncio.sleep(0)  # a flood of connections must not delay the open ones

    def _start_connection(self, peer: socket.socket) -> None:
        connection = HttpConnection(peer, self._limits, self._handle, self._on_refused)
        context = None if self._certificates is None else self._certificates.current().context
        serving: Coroutine[Any, Any, None] = connection.run(context)
        task = asyncio.get_running_loop().create_task(serving)
        self._open[connection] = task

        def end(task: asyncio.Task[None]) -> None:
            self._open.pop(connection, None)
            connection.close()
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("a connection to the HTTP port failed", exc_info=error)

        task.add_done_callback(end)

    def _make_room(self, reason: str) -> None:
        """Close the connection that has been idle longest: no request sent, nothing of a response received."""
        if not self._open:
            return
        victim = min(self._open, key=lambda connection: connection.since)
        victim.evict()
        self._open.pop(victim).cancel()
        now = time.monotonic()
        if now - self._last_warning >= _WARNING_INTERVAL_SECONDS:
            self._last_warning = now
            _log.warning("HTTP port: %s: closing the connections that have been idle longest", reason)

    async def _handle(self, request: HttpRequest) -> Page:
        """Handle a request.

        A new connection's first probe goes ahead of busy clients, so that hundreds of them cannot delay it.
        """
        route = self._pages.get(request.path)
        if route is None or not (route.probe and request.first):
            async with self._turn:
                await asyncio.sleep(0)  # the place is free again one turn later
        if route is None or not route.probe:
            scope = "read" if route is None else route.scope
            refusal = self._access.refusal(request.authorization, request.has_certificate, scope, request.host)
            if refusal is not None:
                return refusal
        if route is None:
            return text(HTTPStatus.NOT_FOUND, f"not found; the pages are {', '.join(self._pages)}")
        return await self._renderer.page(request.path, request.query if route.takes_query else request.accept)


def _unexpected(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what asyncio reports as an error, except hang-ups and failed handshakes."""
    error = context.get("exception")
    if not isinstance(error, OSError):
        _log.error("HTTP port: %s", context.get("message"), exc_info=error)


def _listen(host: str, port: int) -> socket.socket:
    listener = ports.listen(host, port, "--http-port", _BACKLOG)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # accepted sockets inherit it
    return listener
