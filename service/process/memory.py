"""The bounds of a server where its container's memory is limited: what requests may hold is a part of that."""

from __future__ import annotations

import logging

from bf16kit.controlgroup import Memory
from service.process.config import ServerConfig

_log = logging.getLogger(__name__)
PART = 4  # of the container's memory one is for requests and answers, of all workers together
_LEAST_CONTAINER = 96 << 20  # in which a server that had no model, and its health check, went on
_LEAST = 1 << 20  # bytes: a server that takes none is of no use


def bounded(config: ServerConfig, memory: Memory | None) -> ServerConfig:
    """``config`` with smaller ``max_request_bytes`` and ``max_message_bytes`` where the container is small; what was
    given stays as it is."""
    if memory is None:
        return config
    share = max(_LEAST, for_requests(memory) // config.workers)
    smaller = {
        key: share
        for key in ("max_request_bytes", "max_message_bytes")
        if key not in config.model_fields_set and getattr(config, key) > share
    }
    return config.model_copy(update=smaller)


def for_requests(memory: Memory) -> int:
    """The bytes of the container's memory that are kept for what requests hold."""
    return memory.limit // PART


def announce(config: ServerConfig, memory: Memory | None) -> None:
    """What the limit is, and what follows from it; nothing where there is none."""
    if memory is not None:
        each = " in each worker" if config.workers > 1 else ""
        _log.info(
            "memory: %s; requests may hold %d bytes of it%s, one message %d",
            memory,
            config.max_request_bytes,
            each,
            config.max_message_bytes,
        )
        if memory.limit < _LEAST_CONTAINER:
            _log.warning(
                "memory: %.0f MB are too little for a server, even without a model: the system may end it at any time;"
                " give the container %.0f MB and what its models take (docker run --memory, resources.limits.memory)",
                memory.limit / 1e6,
                _LEAST_CONTAINER / 1e6,
            )
