"""A server whose standard error is a pipe that nobody reads, as under a supervisor that hangs."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from artifacts import write_mlp
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import infer_request
from waiting import until

from service.grpc.handlers import SERVICE

_DRAIN_SECONDS = 25.0  # the default of drain_seconds
_BANNER = re.compile(r"gRPC on \S+ port (\d+); metrics and status page on http://\S+:(\d+)/")


class Unread:
    """``bf16-serve`` with a log level of debug, whose log is read only by :meth:`read`."""

    def __init__(self, repository: Path) -> None:
        self._reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)  # full after a few lines
        program = Path(sys.executable).with_name("bf16-serve")
        self.process = subprocess.Popen(
            [program, "--repository", repository, "--grpc-port", "0", "--http-port", "0"],
            stderr=writer,
            env={**os.environ, "BF16KIT_LOG_LEVEL": "debug"},
        )
        os.close(writer)
        self.log = ""
        found = self.read(_BANNER)
        self._http = int(found[2])
        until(self._is_ready, 60, "ready")
        self.channel = grpc.insecure_channel(f"127.0.0.1:{found[1]}")

    def read(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Read the log until ``pattern`` is in what has been read so far."""
        while (found := pattern.search(self.log)) is None:
            part = os.read(self._reader, 1 << 16)
            assert part, self.log
            self.log += part.decode()
        return found

    def infer(self, requests: int) -> None:
        """Send requests, each of which is a long line in a debug log, and check that all are answered."""
        call: Any = self.channel.unary_unary(f"/{SERVICE}/ModelInfer")
        message = infer_request("mlp", x=np.ones((1, 16), np.float32))
        message.id = "i" * 256
        serialised = message.SerializeToString()
        for _ in range(requests // 50):
            for answer in [call.future(serialised, timeout=30) for _ in range(50)]:
                answer.result()

    def check_alive(self) -> None:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert self._is_ready()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._http}/readyz", timeout=30) as page:
                return bool(page.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
            return False

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()
        os.close(self._reader)


@pytest.fixture
def unread(tmp_path: Path) -> Iterator[Unread]:
    write_mlp(tmp_path / "mlp" / "1")
    server = Unread(tmp_path)
    yield server
    server.close()


@pytest.mark.long
def test_a_server_whose_log_nobody_reads_answers_and_ends_on_sigterm(unread: Unread) -> None:
    unread.infer(3000)
    unread.check_alive()
    unread.process.terminate()
    started = time.monotonic()
    assert unread.process.wait(60) == 0
    assert time.monotonic() - started < _DRAIN_SECONDS


@pytest.mark.long
def test_the_log_says_how_many_lines_were_lost_while_nobody_read_it(unread: Unread) -> None:
    unread.infer(5000)
    lost = int(unread.read(re.compile(r"WARNING service.config.logs: (\d+) log lines before this one are lost"))[1])
    assert lost > 0
    assert unread.log.count("request answered") + lost >= 5000
    unread.infer(50)
    unread.read(re.compile(r"are lost(?:.*\n)+(?:.*request answered.*\n){50}"))
