"""The real server, configured as in production, in this process: for clients that use only its address."""

from __future__ import annotations

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
def running(repository: Path, *models: str, **settings: Any) -> Iterator[str]:
    """Yield ``host:port`` of a server with these settings, once the given models have loaded."""
    stop, started = Stop(), SimpleQueue[int]()
    config = ServerConfig(repository=repository, grpc_port=0, http_port=0, device="cpu", threads=1, **settings)
    server = threading.Thread(target=serve_single_process, args=(config, stop, lambda port, _: started.put(port)))
    server.start()
    try:
        where = f"127.0.0.1:{started.get(timeout=60)}"
        for model in models:
            _await_serving(where, model)
        yield where
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
