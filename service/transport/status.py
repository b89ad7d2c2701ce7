"""The one table from errors to gRPC codes. What is not in it was not expected: its text stays in the log."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from grpc import StatusCode

from bf16kit.errors import (
    AlreadyExists,
    Bf16kitError,
    Cancelled,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)

_MAX_DETAILS = 500  # characters: details travel in HTTP/2 headers, which hold 8 KiB
_log = logging.getLogger(__name__)

CODES: Mapping[type[RequestError], StatusCode] = {
    InvalidRequest: StatusCode.INVALID_ARGUMENT,
    NotFound: StatusCode.NOT_FOUND,
    AlreadyExists: StatusCode.ALREADY_EXISTS,
    Unavailable: StatusCode.UNAVAILABLE,
    Overloaded: StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: StatusCode.DEADLINE_EXCEEDED,
    Cancelled: StatusCode.CANCELLED,
    Unsupported: StatusCode.UNIMPLEMENTED,
    Unauthenticated: StatusCode.UNAUTHENTICATED,
    Forbidden: StatusCode.PERMISSION_DENIED,
}


@dataclass(frozen=True, slots=True)
class Status:
    """What a caller is told."""

    code: StatusCode
    details: str


class StatusTable:
    """:data:`CODES`, with the code for overload that the operator chose.

    Triton answers overload with UNAVAILABLE, which KServe's client retries three times: overload multiplies itself.
    """

    def __init__(self, overload: StatusCode = StatusCode.RESOURCE_EXHAUSTED) -> None:
        self._codes = {**CODES, Overloaded: overload}

    def of(self, error: Exception, about: Mapping[str, object] | None = None) -> Status:
        """The status for ``error``. One that is not a refusal is logged here, under an incident id of its own, with
        what ``about`` says of its request in the words of :data:`service.process.logs.FIELDS`."""
        if isinstance(error, RequestError):
            for kind in type(error).__mro__:
                if kind in self._codes:
                    return Status(self._codes[kind], _shortened(str(error)))
        return _incident(error, about or {})


def _incident(error: Exception, about: Mapping[str, object]) -> Status:
    """A failure the caller did not cause: they get a number to quote, the log gets the number and the text."""
    incident = secrets.token_hex(6)
    kind = "failure" if isinstance(error, Bf16kitError) else "bug"
    _log.error(
        "incident %s: %s while answering a request: %s", incident, kind, error,
        exc_info=error, extra={**about, "code": StatusCode.INTERNAL.name, "incident": incident},
    )  # fmt: skip
    return Status(StatusCode.INTERNAL, f"internal error, incident {incident}; the server's log has the details")


def _shortened(details: str) -> str:
    """``details`` short enough for a header, even if a caller's endless name is in it."""
    return details if len(details) <= _MAX_DETAILS else details[: _MAX_DETAILS - 1] + "…"
