"""The real server, configured as in production, in this process: for clients that use only its address."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bf16kit.service.config.loops import Stop
from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.server import serve_single_process


@contextmanager
def running(repository: Path, *models: str, stop: Stop | None = None, **settings: Any) -> Iterator[str]:
    """Yield ``host:port`` of a server with these settings, once the given models have loaded; ``stop`` ends it."""
    with running_ports(repository, *models, stop=stop, **settings) as (where, _):
        yield where


@contextmanager
def running_ports(
    repository: Path, *models: str, stop: Stop | None = None, **settings: Any
) -> Iterator[tuple[str, int]]:
    """Yield the same, and the HTTP port."""
    stop, started = stop or Stop(), SimpleQueue[tuple[int, int]]()
    config = ServerConfig(repository=repository, grpc_port=0, http_port=0, device="cpu", threads=1, **settings)
    server = threading.Thread(target=serve_single_process, args=(config, stop, lambda *ports: started.put(ports)))
    server.start()
    try:
        port, http_port = started.get(timeout=60)
        where = f"127.0.0.1:{port}"
        for model in models:
            _await_serving(where, model)
        yield where, http_port
    finally:
        stop.set()
        server.join(60)
        stop.close()


def _await_serving(address: str, model: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its RPCs exist only after construction
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=model), timeout=60)
        for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                watch.cancel()
                return
