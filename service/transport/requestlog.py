"""The log line for each request. It is the third reader of a request's observation."""

from __future__ import annotations

import logging

from service.request import Observation

_log = logging.getLogger(__name__)


def log_request(seen: Observation) -> None:
    """Log what was requested, the outcome and the time of each phase at DEBUG; never any tensors.

    If DEBUG is off, ``seen`` is not read at all.
    """
    if not _log.isEnabledFor(logging.DEBUG):
        return
    timings = seen.timings
    told = {
        "model": seen.model,
        "version": seen.version or None,
        "request_id": seen.request_id or None,
        "code": seen.code,
        "trace_id": seen.trace or None,
        "total_s": seen.seconds,
        "queue_s": timings and timings.queue,
        "compute_s": timings and timings.compute,
    }
    _log.debug("request %s", "answered" if seen.answered else "not answered", extra=told)
