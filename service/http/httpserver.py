"""The HTTP port: metrics and probes for machines, the status page for people. No inference here.

uvicorn reads and writes HTTP on one thread with an event loop of its own, so hundreds of silent connections cost no
threads. Its own server has no time limit for a request's headers or a TLS handshake, no limit of connections that still
admits a new client, and reads certificates once. So connections are accepted here, and :class:`_Connection` adds the
limits; docs/decisions/0026 has the measurements.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import h11
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from service.config import ports
from service.config.certificates import CertificateFiles
from service.http.pages import CONTENT_POLICY, Access, Refused, Route, Routes

_log = logging.getLogger(__name__)
_BACKLOG = 1024  # connections held by the system until they are accepted
_SEND_BUFFER = 128 << 10  # bytes of a response held by the system for a client that does not read
_CHUNK = 16 << 10  # bytes of a response sent at once: as much as a slow reader makes the server hold
_READ = 4 << 10  # bytes of requests parsed at once: the limit on headers is exact to so many
_HEADERS = {
    "server": "bf16kit",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "content-security-policy": CONTENT_POLICY,
}
_THREADS = 2  # that make pages
_WAITING = 32  # distinct pages; a scraper requests one
_LONGEST_PAUSE_SECONDS = 0.2  # of such a thread after a page
# Requests that the loop begins to answer in one turn. A probe that is its connection's first request goes ahead, so
# that hundreds of busy clients do not delay it.
_REQUESTS_PER_TURN = 16
_ACCEPT_BURST = 8  # connections accepted in a row: a flood of them must not delay those that are open
_NO_DESCRIPTOR_PAUSE_SECONDS = 0.05  # before accepting again when there are no file descriptors left
_WARNING_INTERVAL_SECONDS = 60.0
_LAST_RESPONSES_SECONDS = 0.5  # wait for responses whose connections were closed, when the server ends


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one connection, and of all together. They are no settings: honest clients stay far below them."""

    connections: int = 256  # a scraper, kubelet and a few people need ten; each costs some 20 KiB
    request_seconds: float = 5.0  # from the connection to its first whole request, TLS handshake included
    idle_seconds: float = 15.0  # from a response to the next whole request
    response_seconds: float = 15.0  # from a request until the client has its response
    header_bytes: int = 16 << 10


class _Connection(H11Protocol):
    """A connection with a time limit for each step, whatever bytes arrive meanwhile."""

    def __init__(self, server: HttpServer, config: Config, state: ServerState) -> None:
        super().__init__(config, state, {}, asyncio.get_running_loop())
        self._of = server
        self._timer = self.loop.call_later(server.limits.request_seconds, self._expire)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast("asyncio.Transport", transport)
        super().connection_made(made)
        made.set_write_buffer_limits(_CHUNK)
        self.app_state |= {"first": True, "certificate": bool(made.get_extra_info("peercert"))}

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._of.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _READ):
            if not self.transport.is_closing():
                super().data_received(data[start : start + _READ])

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._allow(self._of.limits.response_seconds)

    def on_response_complete(self) -> None:
        self._allow(self._of.limits.idle_seconds)
        self.app_state["first"] = False
        super().on_response_complete()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._of.progressed(self)

    def send_400_response(self, msg: str) -> None:
        self._of.on_refused("http_malformed")
        if self.conn.our_state is h11.IDLE:
            super().send_400_response(msg)
        else:  # an error in the body of a request, which has a response already, or will soon
            self.cycle.disconnected = True
            self.transport.abort()

    def evict(self) -> None:
        """Close the connection at once."""
        self._timer.cancel()
        if self.transport is not None:
            self.transport.abort()

    def _allow(self, seconds: float) -> None:
        """Give the client so many seconds for the next step: it has completed one."""
        if not self.transport.is_closing():  # else the time to take the response still counts
            self._timer.cancel()
            self._timer = self.loop.call_later(seconds, self._expire)
            self._of.progressed(self)

    def _expire(self) -> None:
        if self.conn.trailing_data[0]:  # a part of a request
            self._of.on_refused("http_timeout")
        self.evict()


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
        self._listener = ports.listen(host, port, "--http-port", _BACKLOG)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # accepted sockets inherit it
        self.limits = limits or Limits()
        self.on_refused = on_refused
        self._pages = pages
        self._access = access or Access()
        self._certificates = certificates
        self._threads = ThreadPoolExecutor(_THREADS, "http-page")
        self._waiting: dict[tuple[str, str], Future[Response]] = {}  # pages requested and not begun
        self._turn = asyncio.Semaphore(_REQUESTS_PER_TURN)
        # Connections with the task that opens them, first the one without progress for the longest time.
        self._open: dict[_Connection, asyncio.Task[Any]] = {}
        self._last_warning = -_WARNING_INTERVAL_SECONDS
        self._stop: Future[Callable[[], object]] = Future()
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
                self._stop.result()()
            self._thread.join()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._listener.close()

    # --- connections, on the loop's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:  # noqa: BLE001 -- the last thing this thread can do is say so
            _log.exception("the HTTP port has ended")
        finally:
            if not self._stop.done():
                self._stop.set_exception(RuntimeError("the loop never ran"))

    async def _serve(self) -> None:
        loop, state = asyncio.get_running_loop(), ServerState()
        loop.set_exception_handler(_unexpected)
        # asyncio warns of each response to a client that has gone. Clients could fill the log that way.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        accepting = loop.create_task(self._accept(state))
        stop = asyncio.Event()
        accepting.add_done_callback(lambda _: stop.set())
        self._stop.set_result(lambda: loop.call_soon_threadsafe(stop.set))
        await stop.wait()
        for connection in list(self._open):
            self._evict(connection)
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=_LAST_RESPONSES_SECONDS)
        if accepting.done():
            accepting.result()  # raises the exception that ended it

    async def _accept(self, state: ServerState) -> None:
        loop = asyncio.get_running_loop()
        config = Config(
            self._answer, interface="asgi3", ws="none", lifespan="off", workers=1, proxy_headers=False,
            log_config=None, log_level=logging.ERROR, access_log=False,
            # _Connection's own limit comes first.
            timeout_keep_alive=int(self.limits.idle_seconds) + 1,
            h11_max_incomplete_event_size=self.limits.header_bytes - _READ,  # checked before each further read
        )  # fmt: skip
        config.load()
        state.default_headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
        self._listener.setblocking(False)
        for count in itertools.count(1):
            try:
                peer, _ = await loop.sock_accept(self._listener)
            except ConnectionAbortedError:
                continue  # the client left before it was accepted
            except OSError as error:  # most likely no file descriptor is left
                self._make_room(f"connections cannot be accepted: {error.strerror}")
                await asyncio.sleep(_NO_DESCRIPTOR_PAUSE_SECONDS)
                continue
            if len(self._open) >= self.limits.connections:
                self._make_room(f"it has {len(self._open)} connections, its limit")
            self._start_connection(_Connection(self, config, state), peer)
            if count % _ACCEPT_BURST == 0:
                await asyncio.sleep(0)

    def _start_connection(self, connection: _Connection, peer: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {}
        if self._certificates is not None:
            tls = {
                "ssl": self._certificates.current().context,
                "ssl_handshake_timeout": self.limits.request_seconds,
                "ssl_shutdown_timeout": 1.0,
            }
        opening = loop.create_task(loop.connect_accepted_socket(lambda: connection, peer, **tls))

        def opened(task: asyncio.Task[Any]) -> None:
            if task.cancelled() or (error := task.exception()) is not None:
                connection.evict()
                self.forget(connection)
                peer.close()
                if not task.cancelled() and not isinstance(error, OSError):
                    _log.error("a connection to the HTTP port failed", exc_info=error)

        self._open[connection] = opening
        opening.add_done_callback(opened)

    def progressed(self, connection: _Connection) -> None:
        """Note that a client has sent a request, or received a part of its response."""
        if (opening := self._open.pop(connection, None)) is not None:
            self._open[connection] = opening

    def forget(self, connection: _Connection) -> None:
        """Note that a connection has ended."""
        self._open.pop(connection, None)

    def _evict(self, connection: _Connection) -> None:
        self._open.pop(connection).cancel()
        connection.evict()

    def _make_room(self, reason: str) -> None:
        """Close the connection that has been idle longest: no request sent, nothing of a response received."""
        if not self._open:
            return
        self.on_refused("http_connections")
        self._evict(next(iter(self._open)))
        now = time.monotonic()
        if now - self._last_warning >= _WARNING_INTERVAL_SECONDS:
            self._last_warning = now
            _log.warning("HTTP port: %s: closing the connections that have been idle longest", reason)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; uvicorn calls it."""
        with contextlib.suppress(asyncio.CancelledError):  # only when the loop ends
            response = await self._respond(Request(scope))
            if isinstance(response, Refused):
                self.on_refused(response.reason)
            await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
            # Each piece is sent once the client has most of the one before: a slow reader holds no more in memory.
            for start in range(0, len(response.body), _CHUNK) if scope["method"] != "HEAD" else ():
                piece = bytes(response.body[start : start + _CHUNK])
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body"})

    async def _respond(self, request: Request) -> Response:
        path = request.scope["path"]
        route = self._pages.get(path)
        state = request.scope["state"]
        if route is None or not route.probe or not state["first"]:
            async with self._turn:
                await asyncio.sleep(0)  # the place is free again one turn later
        if request.method not in ("GET", "HEAD"):
            return Refused(
                405,
                "this port answers GET and HEAD only",
                "http_malformed",
                {"Allow": "GET, HEAD", "Connection": "close"},
            )
        if route is not None and route.probe:
            return self._make(path, route, "")
        scope, header = "read" if route is None else route.scope, request.headers
        # Two such headers, joined, are not a valid token.
        authorization = ", ".join(header.getlist("authorization"))
        host = header.get("host", "")
        if (refusal := self._access.refusal(authorization, state["certificate"], scope, host)) is not None:
            return refusal
        if route is None:
            return PlainTextResponse(f"not found; the pages are {', '.join(self._pages)}\n", 404)
        return await self._page(path, route, request)

    async def _page(self, path: str, route: Route, request: Request) -> Response:
        """Make a page on a thread, once for all clients that wait for it. It is never older than its request."""
        query = request.scope["query_string"].decode("latin-1")
        key = path, query if route.takes_query else ", ".join(request.headers.getlist("accept"))
        job = self._waiting.get(key)
        if job is None:
            if len(self._waiting) >= _WAITING:
                return Refused(503, "too many pages are requested; try again", "http_busy", {"Retry-After": "1"})
            self._waiting[key] = job = Future()
            self._threads.submit(self._run_job, key, job, route)
        return await asyncio.shield(asyncio.wrap_future(job))

    def _run_job(self, key: tuple[str, str], job: Future[Response], route: Route) -> None:
        started = time.monotonic()
        self._waiting.pop(key, None)  # only the loop adds entries; whoever comes from now on gets a newer page
        job.set_result(self._make(key[0], route, key[1]))
        # Pages take at most a quarter of these threads' time: clients without pauses must not slow down inference.
        time.sleep(min(3 * (time.monotonic() - started), _LONGEST_PAUSE_SECONDS))

    def _make(self, path: str, route: Route, argument: str) -> Response:
        try:
            return route.make(argument)
        except Exception:  # noqa: BLE001 -- an empty answer would tell neither a scraper nor the operator
            _log.exception("%s cannot be answered", path)
            return PlainTextResponse("internal error; the server's log has the details\n", 500)


def _unexpected(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what asyncio reports as an error, except hang-ups and failed handshakes."""
    error = context.get("exception")
    if not isinstance(error, OSError):
        _log.error("HTTP port: %s", context.get("message"), exc_info=error)
