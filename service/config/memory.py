"""Limits of a server in a container with limited memory: requests may use a fixed part of that memory."""

from __future__ import annotations

import logging

from bf16kit.system.controlgroup import Memory
from service.config.serverconfig import ServerConfig

_log = logging.getLogger(__name__)
MEMORY_DIVISOR = 4  # requests and responses, over all workers, may take 1/MEMORY_DIVISOR of the container's memory
_LEAST_CONTAINER = 96 << 20  # measured: enough for a server without a model, and its health check
_LEAST = 1 << 20  # bytes: a server that accepts less is useless


def fit_to_memory(config: ServerConfig, memory: Memory | None) -> ServerConfig:
    """Return ``config`` with lower ``max_request_bytes`` and ``max_message_bytes`` in a small container.

    Limits that were set explicitly stay as they are.
    """
    if memory is None:
        return config
    share = max(_LEAST, request_bytes(memory) // config.workers)
    smaller = {
        key: share
        for key in ("max_request_bytes", "max_message_bytes")
        if key not in config.model_fields_set and getattr(config, key) > share
    }
    return config.model_copy(update=smaller)


def request_bytes(memory: Memory) -> int:
    """Return the bytes of the container's memory that requests may use."""
    return memory.limit // MEMORY_DIVISOR


def announce(config: ServerConfig, memory: Memory | None) -> None:
    """Log the memory limit and its consequences; nothing without a limit."""
    if memory is not None:
        each = " in each worker" if config.workers > 1 else ""
        _log.info(
            "memory: %s; requests may use %d bytes of it%s, one message at most %d",
            memory,
            config.max_request_bytes,
            each,
            config.max_message_bytes,
        )
        if memory.limit < _LEAST_CONTAINER:
            _log.warning(
                "memory: %.0f MB are too little for a server, even without a model: the system may kill it at any time;"
                " give the container %.0f MB plus what its models take (docker run --memory, resources.limits.memory)",
                memory.limit / 1e6,
                _LEAST_CONTAINER / 1e6,
            )
