"""One connection of the HTTP port: sequential requests, each with a time and a size limit. h11 parses them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

import h11

from service.http.pages import Page, text

_CHUNK = 16 << 10  # bytes of a response sent at once: as much as a slow reader makes the server hold
_READ = 4 << 10
# Time for a rejected client to read why, before its unread bytes make the system reset the connection.
_LINGER_SECONDS = 1.0
_LINGER_BYTES = 1 << 20
_HEADERS = [
    ("Server", "bf16kit"),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    (
        "Content-Security-Policy",  # no external resources, no scripts, no embedding in frames
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'",
    ),
]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one connection, and of all together. Seconds and bytes."""

    connections: int = 256
    request_seconds: float = 5.0  # from the connection to its first whole request, TLS handshake included
    idle_seconds: float = 15.0  # from a response to the next whole request
    response_seconds: float = 15.0  # for a client to receive a response
    header_bytes: int = 16 << 10
    headers: int = 64


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request: the parts that this port reads."""

    path: str
    query: str
    accept: str
    authorization: str
    host: str
    has_certificate: bool
    first: bool  # of its connection


Handler = Callable[[HttpRequest], Awaitable[Page]]


class HttpConnection:
    """Serves one socket; see :meth:`run`.

    ``since`` is when the client last sent a request or received a piece of its response, on the loop's clock.
    """

    def __init__(self, peer: socket.socket, limits: Limits, handle: Handler, on_refused: Callable[[str], None]) -> None:
        self._record_progress()
        self._peer = peer
        self._limits = limits
        self._handle = handle
        self._on_refused = on_refused
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.header_bytes)
        self._first = True
        self._receiving = False  # some bytes of a request have arrived
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self, context: ssl.SSLContext | None) -> None:
        """Serve until either side ends the connection. Network failures are not errors. :meth:`close` must follow."""
        with contextlib.suppress(OSError, TimeoutError, h11.ProtocolError):
            await self._serve(context)

    def close(self) -> None:
        """Close the socket and drop unsent data. Also for a :meth:`run` that was cancelled before it began."""
        if self._streams is None:
            self._peer.close()
        else:
            self._streams[1].transport.abort()

    def evict(self) -> None:
        """Tell a client that has begun a request that its connection is needed. The caller ends :meth:`run`."""
        self._on_refused("http_connections")
        if self._receiving and self._streams is not None and self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            message = "too many connections; try again"
            with contextlib.suppress(OSError, h11.ProtocolError):
                page = text(HTTPStatus.SERVICE_UNAVAILABLE, message, ("Retry-After", "1"))
                self._streams[1].write(self._head(page, last=True) + page.body)

    async def _serve(self, context: ssl.SSLContext | None) -> None:
        request_timeout = self._limits.request_seconds
        while (request := await self._next_request(request_timeout, context)) is not None:
            async with asyncio.timeout(self._limits.response_seconds):
                keep_alive = await self._respond(request)
            if not keep_alive:
                await self._close_gracefully()
                return
            self._receiving = bool(self._http.trailing_data[0])
            self._record_progress()
            request_timeout = self._limits.idle_seconds

    def _record_progress(self) -> None:
        self.since = asyncio.get_running_loop().time()

    async def _next_request(self, timeout: float, context: ssl.SSLContext | None) -> h11.Request | Page | None:
        """Return the next request, or the page that rejects it; None if the client has hung up or sends nothing."""
        try:
            async with asyncio.timeout(timeout):
                if self._streams is None:
                    self._streams = await _open(self._peer, context, timeout)
                return await self._read_request(self._streams[0])
        except TimeoutError:
            return _TOO_SLOW if self._receiving else None
        except h11.RemoteProtocolError as error:
            return _malformed(error)

    async def _read_request(self, reader: asyncio.StreamReader) -> h11.Request | None:
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:  # the connection is closed, or switches to another protocol
                return None
            data = await reader.read(_READ)
            self._receiving = self._receiving or bool(data)
            self._http.receive_data(data)

    async def _respond(self, request: h11.Request | Page) -> bool:
        """Send the response. Return whether the connection can take another request."""
        if isinstance(request, Page):
            page, last, with_body = request, True, True
        else:
            self._record_progress()
            page = self._rejection(request) or await self._handle(self._parsed(request))
            last = page.status == HTTPStatus.METHOD_NOT_ALLOWED or not self._ends_with_headers()
            with_body = request.method != b"HEAD"
        if page.rejection:
            self._on_refused(page.rejection)
        await self._send(page, last, with_body)
        if last or self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        self._first = False
        return True

    async def _send(self, page: Page, last: bool, with_body: bool) -> None:
        """Send the page in pieces, each once the client has the one before: a slow reader holds one piece in memory."""
        _, writer = self._connected
        writer.write(self._head(page, last))
        for start in range(0, len(page.body) if with_body else 0, _CHUNK):
            writer.write(self._http.send(h11.Data(data=page.body[start : start + _CHUNK])) or b"")
            await writer.drain()
            self._record_progress()
        writer.write(self._http.send(h11.EndOfMessage()) or b"")
        await writer.drain()

    async def _close_gracefully(self) -> None:
        """Close an answered connection gently, so that the client gets the response: unread bytes would reset it."""
        reader, writer = self._connected
        self._record_progress()
        async with asyncio.timeout(_LINGER_SECONDS):
            if not writer.can_write_eof():  # TLS has its own closing handshake
                writer.close()
                await writer.wait_closed()
                return
            writer.write_eof()
            left = _LINGER_BYTES
            while left > 0 and (data := await reader.read(_LINGER_BYTES)):
                left -= len(data)

    @property
    def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert self._streams is not None  # noqa: S101 -- for mypy: whoever has asked has a connection
        return self._streams

    def _head(self, page: Page, last: bool) -> bytes:
        headers = [("Content-Type", page.content_type), ("Content-Length", str(len(page.body)))]
        headers += [*_HEADERS, *page.headers, *([("Connection", "close")] if last else [])]
        return self._http.send(h11.Response(status_code=page.status, reason=page.status.phrase, headers=headers)) or b""

    def _ends_with_headers(self) -> bool:
        """Whether the request ends with its headers.

        A request with a body is answered too, but its body is not read.
        """
        try:
            return isinstance(self._http.next_event(), h11.EndOfMessage)
        except h11.RemoteProtocolError:
            return False

    def _rejection(self, request: h11.Request) -> Page | None:
        if request.method not in (b"GET", b"HEAD"):
            message = "this port answers GET and HEAD only"
            return text(HTTPStatus.METHOD_NOT_ALLOWED, message, ("Allow", "GET, HEAD"), rejection="http_malformed")
        if len(request.headers) > self._limits.headers:
            message = f"{len(request.headers)} headers, over the limit of {self._limits.headers}; send fewer"
            return text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message, rejection="http_malformed")
        return None

    def _parsed(self, request: h11.Request) -> HttpRequest:
        def header(name: bytes) -> str:
            return ", ".join(value.decode("latin-1") for key, value in request.headers if key == name)

        _, writer = self._connected
        path, query = _split_target(request.target)
        return HttpRequest(
            path=path,
            query=query,
            accept=header(b"accept"),
            authorization=header(b"authorization"),  # two such headers, joined, are not a valid token
            host=header(b"host"),
            has_certificate=bool(writer.get_extra_info("peercert")),
            first=self._first,
        )


_TOO_SLOW = text(HTTPStatus.REQUEST_TIMEOUT, "the request took too long to arrive", rejection="http_timeout")


def _malformed(error: h11.RemoteProtocolError) -> Page:
    """Return the page for a request that h11 cannot parse.

    Its status is 400; 431 for headers that are too large; 501 for an unknown transfer coding.
    """
    status = HTTPStatus(error.error_status_hint)
    return text(status, f"{status.phrase.lower()}: the request cannot be parsed", rejection="http_malformed")


def _split_target(target: bytes) -> tuple[str, str]:
    """Split a request target into path and query."""
    try:
        found = urlsplit(target.decode("latin-1"))
    except ValueError:  # an invalid IPv6 address
        return "", ""
    return found.path, found.query


async def _open(
    peer: socket.socket, context: ssl.SSLContext | None, seconds: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open streams over an accepted socket, after its TLS handshake."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(_CHUNK)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol,
        peer,
        ssl=context,
        ssl_handshake_timeout=None if context is None else seconds,
        ssl_shutdown_timeout=None if context is None else _LINGER_SECONDS,
    )
    transport.set_write_buffer_limits(0)  # `drain` returns once the system has taken everything
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
