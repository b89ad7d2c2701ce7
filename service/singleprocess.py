"""A server of one process: connects the models, the gRPC port and the stop signal."""

from __future__ import annotations

from service.config.serverconfig import ServerConfig
from service.config.stop import Ending, OnStarted, Stop
from service.grpcport import build_transport
from service.httpport import announce
from service.served import ModelServer

_MAINTAIN_SECONDS = 0.1


def serve_single_process(config: ServerConfig, stop: Stop, on_started: OnStarted) -> Ending:
    """Serve until ``stop`` is set, then drain. The server is live at once, and ready when its models are loaded.

    Raises ConfigError for a port in use.
    """
    served = ModelServer(config)
    try:
        transport = build_transport(
            config, served.repository, served.metrics.refused, served.credentials, served.operations, served.tracing
        )
        port = transport.start()
    except BaseException:
        served.http.close()
        raise

    def listening() -> None:
        announce(config, port, served.http.port)
        on_started(port, served.http.port)

    try:
        served.start(port, listening)
        while not stop.wait(_MAINTAIN_SECONDS):
            served.maintain()
        return served.drain(transport)
    finally:
        served.close()
