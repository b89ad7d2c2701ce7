"""The server: one process, or a supervisor with several workers."""

from __future__ import annotations

from service.config.serverconfig import ServerConfig
from service.config.stop import Ending, OnStarted, Stop


def run(config: ServerConfig, stop: Stop, on_started: OnStarted = lambda grpc_port, http_port: None) -> Ending:
    """Serve until ``stop`` is set, then drain. The server is live at once, and ready when its models are loaded.

    Raises ConfigError for a port in use.
    """
    if config.workers > 1:
        from service.workers.supervisor import supervise

        return supervise(config, stop, on_started)
    from service.singleprocess import (
        serve_single_process,
    )  # imports gRPC and the runtimes, which a supervisor does not need

    return serve_single_process(config, stop, on_started)
