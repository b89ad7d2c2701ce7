"""The HTTP port, for machines that watch (metrics, probes) and people who look (the status page). No inference here."""

from __future__ import annotations

import errno
import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

from bf16kit.errors import ConfigError
from service.contract import Registry
from service.status_http.page import status_page
from service.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
TEXT = "text/plain; charset=utf-8"
_IDLE_SECONDS = 15  # a connection that says nothing for this long is closed
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
}


@dataclass(frozen=True, slots=True)
class Page:
    """One answer."""

    status: HTTPStatus
    content_type: str
    body: bytes


#: Paths to what answers them, given the request's Accept header.
Routes = Mapping[str, Callable[[str], Page]]


def routes(registry: Registry, metrics: Metrics) -> Routes:
    """``/metrics``, ``/livez``, ``/readyz`` and ``/``."""

    def scrape(accept: str) -> Page:
        body, content_type = metrics.expose(accept)
        return Page(HTTPStatus.OK, content_type, body)

    def live(_: str) -> Page:
        return _probe(registry.live, "live")

    def ready(_: str) -> Page:
        return _probe(registry.ready, "ready")

    def people(_: str) -> Page:
        return Page(HTTPStatus.OK, "text/html; charset=utf-8", status_page(registry).encode())

    return {"/metrics": scrape, "/livez": live, "/readyz": ready, "/": people}


class HttpServer:
    """Binds in the constructor, so that a port in use is known before anything is loaded; :meth:`start` serves."""

    def __init__(self, host: str, port: int, pages: Routes) -> None:
        handler = type("Handler", (_Handler,), {"pages": pages})
        kind = _Ipv6Server if ":" in host else _Server
        try:
            self._server = kind((host, port), handler)
        except (OSError, UnicodeError) as error:  # UnicodeError: a host that cannot be a domain name
            raise ConfigError(_why_not_bound(host, port, error)) from None
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="http", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no event."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("a connection to the HTTP port failed")


class _Ipv6Server(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "bf16kit"
    sys_version = ""
    timeout = _IDLE_SECONDS
    pages: ClassVar[Routes] = {}

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Probes and scrapes come every few seconds: they are not events."""

    def _answer(self, *, with_body: bool) -> None:
        page = self._page()
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(page.body)

    def _page(self) -> Page:
        make = self.pages.get(urlsplit(self.path).path)
        if make is None:
            known = ", ".join(self.pages)
            return Page(HTTPStatus.NOT_FOUND, TEXT, f"not found; there are {known}\n".encode())
        try:
            return make(self.headers.get("Accept", ""))
        except Exception:  # noqa: BLE001 -- an empty answer would tell neither a scraper nor the operator
            _log.exception("%s cannot be answered", self.path)
            return Page(HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, b"internal error; the server's log has the details\n")


def _probe(good: bool, word: str) -> Page:
    if good:
        return Page(HTTPStatus.OK, TEXT, f"{word}\n".encode())
    return Page(HTTPStatus.SERVICE_UNAVAILABLE, TEXT, f"not {word}; / says why\n".encode())


def _why_not_bound(host: str, port: int, error: OSError | UnicodeError) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program; stop it, or choose another --http-port"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return f"cannot listen on {host} port {port}: {reason}; check --host and --http-port"
