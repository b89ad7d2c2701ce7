"""The HTTP port's paths: what each answers, and who may see it."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

import bf16kit
from bf16kit.messages.errors import InvalidRequest, NotFound, RequestError
from bf16kit.messages.wording import quoted
from bf16kit.service.config.serverconfig import LOOPBACK
from bf16kit.service.config.tokens import Scope, TokenFile
from bf16kit.service.contract import Overview, SlotView

_log = logging.getLogger(__name__)
#: Returns the evidence file of a model's name and version. Raises RequestError.
Fetch = Callable[[str, int], bytes]
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^][:@/\s]+)(:\d{1,5})?", re.ASCII)  # the Host header
# A third of all values, which the status page does not show: distributions are for Prometheus.
_LEFT_OUT = tuple(
    f"bf16kit_{name}"
    for name in ("batch_rows", "drift_cosine_distance", "drift_max_abs", "drift_pooled", "drift_relative_l2")
)
#: Returns the current samples of the server; each has a ``name``, ``labels`` and a ``value``.
Samples = Callable[[], Iterable[Any]]
_PAGE = Path(__file__).with_name("status.html").read_text("utf-8")


def _hash(tag: str) -> str:
    """Return the source that permits this element's content in a content security policy."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


#: Only the page's own script and style, no resources from elsewhere, no embedding in frames.
CONTENT_POLICY = (
    f"default-src 'none'; script-src {_hash('script')}; style-src {_hash('style')}; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Refused(PlainTextResponse):
    """A rejection in one line, which the metrics count under ``reason``."""

    def __init__(self, status: int, message: str, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{message}\n", status, headers)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Route:
    """What answers a path.

    ``make`` gets the request's Accept header, or its query if ``takes_query``. A ``probe`` is cheap and open to
    everybody. For other paths a token needs ``scope``.
    """

    make: Callable[[str], Response]
    probe: bool = False
    takes_query: bool = False
    scope: Scope = "read"


Routes = Mapping[str, Route]
Expose = Callable[[str], tuple[bytes, str]]  # returns the metrics for an Accept header, and their content type


def routes(
    registry: Overview, expose: Expose, snapshot: Callable[[], Mapping[str, Any]], evidence: Route | None = None
) -> Routes:
    """Return the routes: ``/metrics``, ``/livez``, ``/readyz``, the status page at ``/``, and ``evidence``, if given.

    ``snapshot`` returns what ``/status.json`` holds, from which the page is drawn.
    """

    def scrape(accept: str) -> Response:
        body, content_type = expose(accept)
        return Response(body, headers={"Content-Type": content_type})

    def status_json(_: str) -> Response:
        return Response(json.dumps(snapshot(), allow_nan=False), media_type="application/json")

    return {
        "/metrics": Route(scrape),
        "/livez": Route(lambda _: _probe(True, "live"), probe=True),
        "/readyz": Route(lambda _: _probe(registry.ready, "ready"), probe=True),
        "/status.json": Route(status_json),
        "/": Route(lambda _: HTMLResponse(_PAGE)),
        **({} if evidence is None else {"/evidence": evidence}),
    }


def _probe(ok: bool, state: str) -> Response:
    if ok:
        return PlainTextResponse(f"{state}\n")
    return PlainTextResponse(f"not {state}; see / for the reason\n", 503)


def evidence_route(registry: Overview, fetch: Fetch | None) -> Route:
    """Return the route of ``/evidence?model=NAME&version=N``: the evidence of a breach. ``fetch`` None: it is off.

    It holds client data, so it needs the scope manage, and each download is logged.
    """

    def make(query: str) -> Response:
        if fetch is None:
            off = "evidence is off: start the server with --evidence to keep that of the next breach\n"
            return PlainTextResponse(off, 404)
        try:
            slot = registry.find(*_parse_query(query))
            data = fetch(slot.name, slot.version)
        except RequestError as error:
            status = 400 if isinstance(error, InvalidRequest) else 404 if isinstance(error, NotFound) else 503
            return PlainTextResponse(f"{error}\n".encode("utf-8", "replace"), status)
        _log.warning(
            "model %r version %d: sending the evidence of its last breach, %d bytes, to a client of the HTTP port",
            slot.name, slot.version, len(data),
        )  # fmt: skip
        return Response(data, media_type="application/octet-stream")

    return Route(make, takes_query=True, scope="manage")


def _parse_query(query: str) -> tuple[str, str]:
    """Return the model and the version requested; version "" is the newest. Raises InvalidRequest."""
    try:
        parameters = parse_qs(query, keep_blank_values=True, strict_parsing=True, max_num_fields=8)
    except ValueError:
        parameters = {}
    unknown = sorted(parameters.keys() - {"model", "version"})
    if unknown or len(parameters.get("model", ())) != 1 or len(parameters.get("version", ("",))) != 1:
        hint = f"; {quoted(unknown[0])} is not a parameter of this page" if unknown else ""
        raise InvalidRequest(f"request /evidence?model=NAME, with &version=N for one that is not the newest{hint}")
    return parameters["model"][0], parameters.get("version", [""])[0]


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

    def refusal(self, request: Request, scope: Scope) -> Refused | None:
        """Return why this request is rejected; None if its client may have what needs ``scope``."""
        if self.client_certificate and not request.scope["state"]["certificate"]:
            return Refused(403, "a client certificate of the configured authority is needed", "unauthenticated")
        if self.tokens is None:
            if (
                scope == "manage"
                and not self.client_certificate
                and not self._is_local(request.headers.get("host", ""))
            ):
                message = "without tokens this page is served only for requests to localhost or 127.0.0.1"
                return Refused(403, message, "forbidden")
            return None
        # Two such headers, joined, are not a valid token.
        scopes = self.tokens.scopes(", ".join(request.headers.getlist("authorization")))
        if scopes is None:
            message = "a token is needed: send 'Authorization: Bearer TOKEN'"
            return Refused(401, message, "unauthenticated", {"WWW-Authenticate": 'Bearer realm="bf16kit"'})
        if scope not in scopes:
            challenge = f'Bearer realm="bf16kit", error="insufficient_scope", scope="{scope}"'
            return Refused(403, f"this token lacks the scope {scope!r}", "forbidden", {"WWW-Authenticate": challenge})
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


class StatusReader:
    """What ``/status.json`` holds, from a registry and the metrics; ``status.html`` draws it.

    ``off_reason`` returns why a version's fp32 reference stays off, or "".
    """

    def __init__(
        self,
        registry: Overview,
        samples: Samples,
        *,
        workers: int = 1,
        off_reason: Callable[[str, int], str] = lambda model, version: "",
    ) -> None:
        self._registry = registry
        self._samples = samples
        self._workers = workers
        self._off_reason = off_reason
        self._started = time.monotonic()
        self._ports = 0, 0

    def listening(self, grpc_port: int, http_port: int) -> None:
        self._ports = grpc_port, http_port

    def snapshot(self) -> dict[str, Any]:
        metrics, now = _by_model(self._samples()), time.time()
        return {
            "at": datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
            "at_seconds": now,
            "version": bf16kit.__version__,
            "uptime_seconds": round(time.monotonic() - self._started, 1),
            "workers": self._workers,
            "grpc_port": self._ports[0],
            "http_port": self._ports[1],
            "ready": self._registry.ready,
            "models": [self._model(slot, metrics) for slot in self._registry.models()],
            "rejected_early": metrics.get(("", ""), {}).get("bf16kit_refused_total", {}),
        }

    def _model(self, slot: SlotView, metrics: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
        return {
            "name": slot.name,
            "version": slot.version,
            "state": slot.state,
            "reason": slot.reason,
            "reference_off": self._off_reason(slot.name, slot.version),
            "running": slot.running,
            "metrics": metrics.get((slot.name, str(slot.version)), {}),
        }


def _by_model(samples: Iterable[Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return values by model and version, then by name, then by the values of further labels, ``output`` first."""
    models: dict[tuple[str, str], dict[str, Any]] = {}
    for sample in samples:
        if sample.name.startswith(_LEFT_OUT):
            continue
        labels = dict(sample.labels)
        at = models.setdefault((labels.pop("model", ""), labels.pop("version", "")), {})
        *path, last = sample.name, *(labels[label] for label in sorted(labels, reverse=True))
        for part in path:
            at = at.setdefault(part, {})
        at[last] = sample.value if math.isfinite(sample.value) else str(sample.value)  # JSON has no infinity: "inf"
    return models
