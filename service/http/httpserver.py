"""The HTTP port's connections. :mod:`bf16kit.service.http.pageapp` answers their requests.

uvicorn reads and writes HTTP on one thread with an event loop of its own, so hundreds of silent connections cost no
threads. Its own server has no time limit for a request's headers or a TLS handshake, no limit of connections that still
admits a new client, and reads certificates once. So connections are accepted here, and :class:`Connection` adds the
limits; docs/decisions/0026 has the measurements.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import h11
from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from bf16kit.service.config import ports
from bf16kit.service.config.certificates import CertificateFiles
from bf16kit.service.http.pageapp import CHUNK, PageApp
from bf16kit.service.http.pages import CONTENT_POLICY, Access, Routes

_log = logging.getLogger(__name__)
_BACKLOG = 1024  # connections held by the system until they are accepted
_SEND_BUFFER = 128 << 10  # bytes of a response held by the system for a client that does not read
_READ = 4 << 10  # bytes of requests parsed at once: the limit on headers is exact to so many
_HEADERS = {
    "server": "bf16kit",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "content-security-policy": CONTENT_POLICY,
}
_ACCEPT_BURST = 8  # connections accepted in a row: a flood of them must not delay those that are open
_NO_DESCRIPTOR_PAUSE_SECONDS = 0.05  # before accepting again when there are no file descriptors left
_LAST_RESPONSES_SECONDS = 0.5  # wait for responses whose connections were closed, when the server ends


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one connection, and of all together. They are no settings: honest clients stay far below them."""

    connections: int = 256  # a scraper, kubelet and a few people need ten; each costs some 20 KiB
    request_seconds: float = 5.0  # from the connection to its first whole request, TLS handshake included
    idle_seconds: float = 15.0  # from a response to the next whole request
    response_seconds: float = 15.0  # from a request until the client has its response
    header_bytes: int = 16 << 10


class Connection(H11Protocol):
    """A connection with a time limit for each step, whatever bytes arrive meanwhile."""

    def __init__(self, server: HttpServer, config: Config, state: ServerState) -> None:
        super().__init__(config, state, {}, asyncio.get_running_loop())
        self._of = server
        self._timer = self.loop.call_later(server.limits.request_seconds, self._expire)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast("asyncio.Transport", transport)
        super().connection_made(made)
        made.set_write_buffer_limits(CHUNK)
        self.app_state |= {"first": True, "certificate": bool(made.get_extra_info("peercert")), "connection": self}

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

    @property
    def waits(self) -> bool:
        """Whether the client waits for the server."""
        return self._timer.cancelled()

    def wait_for_server(self) -> None:
        """Let the client wait as long as the server takes: the step's time limit ends."""
        self._timer.cancel()

    def evict(self) -> None:
        self._timer.cancel()
        if self.transport is not None:
            self.transport.abort()

    def _allow(self, seconds: float) -> None:
        """Give the client so many seconds for the next step."""
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
        # Accepted sockets inherit both. asyncio sets the second only on sockets made with the number of a protocol.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.limits = limits or Limits()
        self.on_refused = on_refused
        self.access = access or Access()
        self._app = PageApp(pages, self.access, on_refused)
        self._certificates = certificates
        # Connections with the task that opens them, first the one without progress for the longest time.
        self._open: dict[Connection, asyncio.Task[Any]] = {}
        self._was_full = False
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def answer_inference(self, app: ASGIApp) -> None:
        """Have ``app`` answer the paths of the inference protocol. Call it before :meth:`start`."""
        self._app.inference = app

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End every connection and the thread."""
        if self._thread.ident is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._loop.close()
        self._app.close()
        self._listener.close()

    # --- connections, on the loop's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except Exception:  # noqa: BLE001 -- the last thing this thread can do is say so
            _log.exception("the HTTP port has ended")

    async def _serve(self) -> None:
        loop, state = self._loop, ServerState()
        loop.set_exception_handler(_unexpected)
        # asyncio warns of each response to a client that has gone. Clients could fill the log that way.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        accepting = loop.create_task(self._accept(state))
        accepting.add_done_callback(lambda _: self._stop.set())
        await self._stop.wait()
        for connection in list(self._open):
            self._evict(connection)
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=_LAST_RESPONSES_SECONDS)
        if accepting.done():
            accepting.result()  # raises the exception that ended it

    async def _accept(self, state: ServerState) -> None:
        config = Config(
            self._app, interface="asgi3", ws="none", lifespan="off", workers=1, proxy_headers=False,
            log_config=None, log_level=logging.ERROR, access_log=False,
            # Connection's own limit comes first.
            timeout_keep_alive=int(self.limits.idle_seconds) + 1,
            h11_max_incomplete_event_size=self.limits.header_bytes - _READ,  # checked before each further read
        )  # fmt: skip
        config.load()
        state.default_headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
        self._listener.setblocking(False)
        for count in itertools.count(1):
            try:
                peer, _ = await self._loop.sock_accept(self._listener)
            except ConnectionAbortedError:
                continue  # the client left before it was accepted
            except OSError as error:  # most likely no file descriptor is left
                self._make_room(f"connections cannot be accepted: {error.strerror}")
                await asyncio.sleep(_NO_DESCRIPTOR_PAUSE_SECONDS)
                continue
            if len(self._open) >= self.limits.connections:
                self._make_room(f"it has {len(self._open)} connections, its limit")
            self._start_connection(Connection(self, config, state), peer)
            if count % _ACCEPT_BURST == 0:
                await asyncio.sleep(0)

    def _start_connection(self, connection: Connection, peer: socket.socket) -> None:
        tls: dict[str, Any] = {}
        if self._certificates is not None:
            tls = {
                "ssl": self._certificates.current().context,
                "ssl_handshake_timeout": self.limits.request_seconds,
                "ssl_shutdown_timeout": 1.0,
            }
        opening = self._loop.create_task(self._loop.connect_accepted_socket(lambda: connection, peer, **tls))

        def opened(task: asyncio.Task[Any]) -> None:
            if task.cancelled() or (error := task.exception()) is not None:
                connection.evict()
                self.forget(connection)
                peer.close()
                if not task.cancelled() and not isinstance(error, OSError):
                    _log.error("a connection to the HTTP port failed", exc_info=error)

        self._open[connection] = opening
        opening.add_done_callback(opened)

    def progressed(self, connection: Connection) -> None:
        """Note that a client has sent a request, or received a part of its response: it is the last to be closed."""
        if (opening := self._open.pop(connection, None)) is not None:
            self._open[connection] = opening

    def forget(self, connection: Connection) -> None:
        self._open.pop(connection, None)

    def _evict(self, connection: Connection) -> None:
        self._open.pop(connection).cancel()
        connection.evict()

    def _make_room(self, reason: str) -> None:
        """Close the connection that has been idle longest: no request sent, nothing of a response received.

        One that waits for an inference is not idle; it is closed if there is no other.
        """
        if not self._open:
            return
        self.on_refused("http_connections")
        self._evict(next((each for each in self._open if not each.waits), None) or next(iter(self._open)))
        if not self._was_full:  # logged once, because clients could fill the log
            self._was_full = True
            _log.warning(
                "HTTP port: %s: closing the connections that have been idle longest, now and whenever"
                ' bf16kit_refused_total{reason="http_connections"} grows',
                reason,
            )


def _unexpected(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what asyncio reports as an error, except hang-ups and failed handshakes."""
    error = context.get("exception")
    if not isinstance(error, OSError):
        _log.error("HTTP port: %s", context.get("message"), exc_info=error)
