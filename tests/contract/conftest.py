"""The real server, wired as in production, over artifacts on disk; and tritonclient as it is installed.

The clients see an address and nothing else of ours.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
from artifacts import write_artifact, write_lookup, write_mlp
from grpc_health.v1 import health_pb2, health_pb2_grpc
from onnx import helper

from bf16kit.tensors import TensorSpec
from service import app
from service.process.config import ServerConfig
from service.process.stop import Stop


def _write_types(target: Path) -> None:
    """``doubled = 2·x`` in fp32, and an int32, an int64 and a bool tensor that come back changed."""
    batch = ("batch", 4)
    write_artifact(
        target,
        lambda weight: [
            helper.make_node("MatMul", ["x", weight("w")], ["doubled"]),
            helper.make_node("Neg", ["small"], ["negated"]),
            helper.make_node("Neg", ["large"], ["opposite"]),
            helper.make_node("Not", ["flag"], ["denied"]),
        ],
        {"w": np.eye(4, dtype=np.float32) * 2},
        [
            TensorSpec("x", "float32", batch),
            TensorSpec("small", "int32", batch),
            TensorSpec("large", "int64", batch),
            TensorSpec("flag", "bool", batch),
        ],
        [
            TensorSpec("doubled", "float32", batch, "regression"),
            TensorSpec("negated", "int32", batch),
            TensorSpec("opposite", "int64", batch),
            TensorSpec("denied", "bool", batch),
        ],
        {
            "x": np.ones((2, 4), np.float32),
            "small": np.ones((2, 4), np.int32),
            "large": np.ones((2, 4), np.int64),
            "flag": np.ones((2, 4), np.bool_),
        },
    )


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    _write_types(root / "types" / "1")
    write_mlp(root / "mlp" / "1")
    write_mlp(root / "mlp" / "3")
    (root / "mlp" / "serving.yaml").write_text("version_policy: all\nmax_batch_size: 8\n")
    write_lookup(root / "lookup" / "1")
    write_mlp(root / "drifted" / "1", spoil=1.0)
    return root


@pytest.fixture(scope="session")
def address(repository: Path) -> Iterator[str]:
    """``host:port`` of a server whose models have loaded; one of them may not serve, being over its budget."""
    stop, started = Stop(), SimpleQueue[int]()
    config = ServerConfig(repository=repository, grpc_port=0, http_port=0, device="cpu", threads=1)
    server = threading.Thread(target=app.run, args=(config, stop, lambda port, _: started.put(port)))
    server.start()
    try:
        where = f"127.0.0.1:{started.get(timeout=60)}"
        for model in ("types", "mlp", "lookup"):
            _await_serving(where, model)
        yield where
    finally:
        stop.set()
        server.join(60)
        stop.close()


def _await_serving(address: str, model: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its RPCs exist only once it is made
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=model), timeout=60)
        for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                watch.cancel()
                return
