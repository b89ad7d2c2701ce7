"""The server: one process, or a supervisor with several workers."""

from __future__ import annotations

from service.process.config import ServerConfig
from service.process.stop import Ending, Started, Stop


def run(config: ServerConfig, stop: Stop, started: Started = lambda grpc_port, http_port: None) -> Ending:
    """Serve until ``stop`` is set, then drain. Answers (live, not ready) while the models load in the background.

    Raises ConfigError for a port in use.
    """
    if config.workers > 1:
        from service.workers.supervisor import supervise

        return supervise(config, stop, started)
    from service.alone import serve_alone  # gRPC and what runs models: nothing for a supervisor

    return serve_alone(config, stop, started)
