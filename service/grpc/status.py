"""The only mapping from errors to gRPC codes. Any other exception is unexpected: its text goes to the log only."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from grpc import StatusCode

from bf16kit.messages.errors import (
    AlreadyExists,
    Bf16kitError,
    Cancelled,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
    Unsupported,
)

_MAX_DETAILS = 500  # characters: details travel in HTTP/2 headers, which hold 8 KiB
_log = logging.getLogger(__name__)

CODES: Mapping[type[Exception], StatusCode] = {
    InvalidRequest: StatusCode.INVALID_ARGUMENT,
    NotFound: StatusCode.NOT_FOUND,
    AlreadyExists: StatusCode.ALREADY_EXISTS,
    Unavailable: StatusCode.UNAVAILABLE,
    # Not UNAVAILABLE, as in Triton: KServe's client retries that three times, which multiplies the overload.
    Overloaded: StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: StatusCode.DEADLINE_EXCEEDED,
    Cancelled: StatusCode.CANCELLED,
    Unsupported: StatusCode.UNIMPLEMENTED,
    Unauthenticated: StatusCode.UNAUTHENTICATED,
    Forbidden: StatusCode.PERMISSION_DENIED,
}


@dataclass(frozen=True, slots=True)
class Status:
    """The code and details that a client gets."""

    code: StatusCode
    details: str


def status_of(error: Exception, request_fields: Mapping[str, object] | None = None) -> Status:
    """Return the status for ``error``. One that is not in :data:`CODES` is logged here, and the client gets its id.

    ``request_fields`` are added to the log: facts with the keys of :data:`bf16kit.service.config.logs.FIELDS`.
    """
    if type(error) in CODES:
        details = str(error)  # it may contain a client's very long name
        if len(details) > _MAX_DETAILS:
            details = details[: _MAX_DETAILS - 1] + "…"
        return Status(CODES[type(error)], details)
    incident = secrets.token_hex(6)
    kind_of_error = "failure" if isinstance(error, Bf16kitError) else "bug"
    fields = {**(request_fields or {}), "code": StatusCode.INTERNAL.name, "incident": incident}
    text = "incident %s: %s while answering a request: %s"
    _log.error(text, incident, kind_of_error, error, exc_info=error, extra=fields)
    return Status(StatusCode.INTERNAL, f"internal error, incident {incident}; the server's log has the details")
