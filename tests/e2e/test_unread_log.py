"""A server whose standard error is a pipe that nobody reads, as under a supervisor that hangs."""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts import write_mlp
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import infer_request
from serverprocess import ServerProcess
from workerprocesses import Client

_DRAIN_SECONDS = 25.0  # the default of drain_seconds
_PORTS = re.compile(r"metrics and status page on http://\S+/")


class Pipe:
    """A log that is read only by :meth:`read`, with room for a few lines."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        fcntl.fcntl(self._writer, fcntl.F_SETPIPE_SZ, 4096)
        self.text = ""

    def fileno(self) -> int:
        return self._writer

    def read(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Read the log until ``pattern`` is in what has been read so far."""
        while (found := pattern.search(self.text)) is None:
            part = os.read(self._reader, 1 << 16)
            assert part, self.text
            self.text += part.decode()
        return found

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    write_mlp(tmp_path / "mlp" / "1")
    (tmp_path / "mlp" / "serving.yaml").write_text("max_queue_ms: 60000\n")  # on a busy machine, too, all are answered
    log = Pipe()
    with ServerProcess("--repository", tmp_path, env={"BF16KIT_LOG_LEVEL": "debug"}, log=log) as server:
        log.read(_PORTS)
        yield server.wait_ready()


def infer(server: ServerProcess, requests: int) -> None:
    """Send requests, each of which is a long line in a debug log, and check that all are answered."""
    message = infer_request("mlp", x=np.ones((1, 16), np.float32))
    message.id = "i" * 256
    with Client(server.target) as client:
        for _ in range(requests // 50):
            for answer in [client.ask("ModelInfer").future(message, timeout=30) for _ in range(50)]:
                answer.result()


@pytest.mark.long
def test_a_server_whose_log_nobody_reads_answers_and_ends_on_sigterm(server: ServerProcess) -> None:
    infer(server, 3000)
    with Client(server.target) as client:
        stub: Any = health_pb2_grpc.HealthStub(client.channel)
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=30).status == 1
    assert server.get("/readyz")[0] == 200
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < _DRAIN_SECONDS
