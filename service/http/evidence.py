"""``/evidence?model=NAME&version=N``: the evidence of a breach, for the scope manage, because it holds client data.

It is only served if the server was started with ``--evidence``. Each download is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import parse_qs

from bf16kit.messages.errors import InvalidRequest, NotFound, RequestError, Unavailable
from bf16kit.messages.wording import quoted
from service.contract import Registry
from service.http.pages import Page, Route, text

_log = logging.getLogger(__name__)
OFF = "evidence is off: start the server with --evidence to keep that of the next breach"
CONTENT_TYPE = "application/octet-stream"
#: Returns the evidence file of a model's name and version. Raises RequestError.
Fetch = Callable[[str, int], bytes]

_STATUSES: dict[type[RequestError], HTTPStatus] = {
    InvalidRequest: HTTPStatus.BAD_REQUEST,
    NotFound: HTTPStatus.NOT_FOUND,
    Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
}


def evidence_route(registry: Registry, fetch: Fetch | None) -> Route:
    """Return the route. ``fetch`` None: evidence is off."""

    def make(query: str) -> Page:
        if fetch is None:
            return text(HTTPStatus.NOT_FOUND, OFF)
        try:
            name, version = _parse_query(query)
            slot = registry.find(name, version)
            data = fetch(slot.name, slot.version)
        except RequestError as error:
            return text(_STATUSES.get(type(error), HTTPStatus.SERVICE_UNAVAILABLE), str(error))
        _log.warning(
            "model %r version %d: sending the evidence of its last breach, %d bytes, to a client of the HTTP port",
            slot.name, slot.version, len(data),
        )  # fmt: skip
        return Page(HTTPStatus.OK, CONTENT_TYPE, data)

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
