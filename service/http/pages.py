"""The HTTP port's paths: what each answers, and who may see it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from typing import Protocol

from service.config.serverconfig import LOOPBACK
from service.config.tokens import Scope, TokenFile
from service.contract import Registry
from service.http.page import status_page
from service.http.views import ServerView

TEXT = "text/plain; charset=utf-8"
EVIDENCE = "/evidence"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^][:@/\s]+)(:\d{1,5})?", re.ASCII)  # the Host header


@dataclass(frozen=True, slots=True)
class Page:
    """One response. ``rejection`` is the reason that the metrics count if it is a rejection."""

    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    rejection: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """What answers a path.

    ``make`` gets the request's Accept header, or its query if ``takes_query``. A ``probe`` is cheap and open to
    everybody. For other paths a token needs ``scope``.
    """

    make: Callable[[str], Page]
    probe: bool = False
    takes_query: bool = False
    scope: Scope = "read"


Routes = Mapping[str, Route]


class MetricsSource(Protocol):
    """The part of :class:`service.telemetry.metrics.Metrics` that the port reads."""

    def expose(self, accept: str = "") -> tuple[bytes, str]: ...


def routes(
    registry: Registry, metrics: MetricsSource, snapshot: Callable[[], ServerView], evidence: Route | None = None
) -> Routes:
    """Return the routes: ``/metrics``, ``/livez`` and ``/readyz``; the status page at ``/`` and ``/watch``, and as JSON
    at ``/status.json``; and ``evidence``, if given.

    ``snapshot`` returns what the status page shows.
    """

    def scrape(accept: str) -> Page:
        body, content_type = metrics.expose(accept)
        return Page(HTTPStatus.OK, content_type, body)

    def live(_: str) -> Page:
        return _probe(registry.live, "live")

    def ready(_: str) -> Page:
        return _probe(registry.ready, "ready")

    def status_html(_: str) -> Page:
        return _html(status_page(snapshot()))

    def status_watch(_: str) -> Page:
        return _html(status_page(snapshot(), refreshing=True))

    def status_json(_: str) -> Page:
        return Page(HTTPStatus.OK, "application/json", snapshot().as_json())

    return {
        "/metrics": Route(scrape),
        "/livez": Route(live, probe=True),
        "/readyz": Route(ready, probe=True),
        "/status.json": Route(status_json),
        "/watch": Route(status_watch),
        "/": Route(status_html),
        **({} if evidence is None else {EVIDENCE: evidence}),
    }


def _html(page: str) -> Page:
    return Page(HTTPStatus.OK, "text/html; charset=utf-8", page.encode("utf-8", "replace"))


def text(status: HTTPStatus, message: str, *headers: tuple[str, str], rejection: str = "") -> Page:
    """Return a page of one line."""
    return Page(status, TEXT, f"{message}\n".encode("utf-8", "replace"), headers, rejection)


@dataclass(frozen=True, slots=True)
class Access:
    """Decides who may see pages other than probes: every client, unless tokens or client certificates are configured.

    A path that needs the scope manage is stricter without either. Its request must name this machine, or ``host``, the
    address that the server listens on. A browser sends the hostname in its address bar. If a foreign page's hostname is
    made to resolve to this machine (DNS rebinding), that name does not match, and the page cannot read the response.
    """

    tokens: TokenFile | None = None
    client_certificate: bool = False
    host: str = ""

    def refusal(self, authorization: str, has_certificate: bool, scope: Scope = "read", host: str = "") -> Page | None:
        """Return why this client, which requested ``host``, is rejected; None if it may see the page."""
        if self.client_certificate and not has_certificate:
            message = "this page needs a client certificate of the configured authority"
            return text(HTTPStatus.FORBIDDEN, message, rejection="unauthenticated")
        if self.tokens is None:
            if scope == "manage" and not self.client_certificate and not self._is_local(host):
                message = "without tokens this page is served only for requests to localhost or 127.0.0.1"
                return text(HTTPStatus.FORBIDDEN, message, rejection="forbidden")
            return None
        scopes = self.tokens.scopes(authorization)
        if scopes is None:
            message = "this page needs a token: send 'Authorization: Bearer TOKEN'"
            challenge = ("WWW-Authenticate", 'Bearer realm="bf16kit"')
            return text(HTTPStatus.UNAUTHORIZED, message, challenge, rejection="unauthenticated")
        if scope not in scopes:
            challenge = ("WWW-Authenticate", f'Bearer realm="bf16kit", error="insufficient_scope", scope="{scope}"')
            message = f"this token lacks the scope {scope!r}"
            return text(HTTPStatus.FORBIDDEN, message, challenge, rejection="forbidden")
        return None

    def _is_local(self, host: str) -> bool:
        """Whether a Host header names this machine."""
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1].strip("[]").lower()
        try:
            return ip_address(name).is_loopback or name == self.host
        except ValueError:
            return name in LOOPBACK or name == self.host.lower()


def _probe(ok: bool, state: str) -> Page:
    if ok:
        return text(HTTPStatus.OK, state)
    return text(HTTPStatus.SERVICE_UNAVAILABLE, f"not {state}; see / for the reason")
