"""The log line for each request. It is the third reader of a request's observation."""

from __future__ import annotations

import logging

from service.request import Observation

_log = logging.getLogger(__name__)


def log_request(observation: Observation) -> None:
    """Log what was requested, the outcome and the time of each phase at DEBUG; never any tensors.

    If DEBUG is off, ``observation`` is not read at all.
    """
    if not _log.isEnabledFor(logging.DEBUG):
        return
    timings = observation.timings
    fields = {
        "model": observation.model,
        "version": observation.version or None,
        "request_id": observation.request_id or None,
        "code": observation.code,
        "trace_id": observation.trace or None,
        "total_s": observation.seconds,
        "queue_s": timings and timings.queue,
        "compute_s": timings and timings.compute,
    }
    _log.debug("request %s", "answered" if observation.succeeded else "not answered", extra=fields)
