"""Limits of a server in a container with limited memory: requests may use a fixed part of that memory."""

from __future__ import annotations

import logging

from bf16kit.system.controlgroup import Memory
from service.config.serverconfig import ServerConfig

_log = logging.getLogger(__name__)
MEMORY_DIVISOR = 4  # requests and responses, over all workers, may take 1/MEMORY_DIVISOR of the container's memory
_LEAST_CONTAINER = 96 << 20  # measured: enough for a server without a model, and its health check
_MESSAGES = 8  # of the largest size that requests and responses in flight may hold together
_LEAST = 1 << 20  # bytes: a server that accepts less is useless


def fit_to_memory(config: ServerConfig, memory: Memory | None) -> ServerConfig:
    """Return ``config`` with a lower ``max_message_bytes`` in a small container, unless it was set explicitly."""
    if memory is None or "max_message_bytes" in config.model_fields_set:
        return config
    return config.model_copy(update={"max_message_bytes": min(config.max_message_bytes, _share(config, memory))})


def max_request_bytes(config: ServerConfig, memory: Memory | None) -> int:
    """Return the most bytes that all requests and responses of one process may hold together."""
    wanted = _MESSAGES * config.max_message_bytes
    return wanted if memory is None else min(wanted, _share(config, memory))


def _share(config: ServerConfig, memory: Memory) -> int:
    return max(_LEAST, request_bytes(memory) // config.workers)


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
            max_request_bytes(config, memory),
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
