"""The line that the log has for each request, where one looks for that: the third reader of its observation."""

from __future__ import annotations

import logging

from service.request import Observation

_log = logging.getLogger(__name__)


def log_request(seen: Observation) -> None:
    """Of what was asked, what became of it and where its time went; never of what was in it.

    At DEBUG: where that is off, nothing of ``seen`` is looked at.
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
