"""Servers to attack: processes with default settings, or with the settings that a test gives."""

import contextlib
import resource
import socket
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import figures
import grpc
import numpy as np
import pytest
from artifacts import write_mlp
from attacked import HealthMonitor, Target, over_http
from loopback import infer_request
from rawgrpc import RawConnection
from serverprocess import ServerProcess
from waiting import until

from bf16kit.service.grpc.handlers import SERVICE

_PLACES = {"ModelInfer": 256, "ModelStreamInfer": 64, "ServerMetadata": 128}  # limits of calls without request


def _hold(target: Target, path: str, places: int, stack: contextlib.ExitStack) -> None:
    """Open 400 calls of this RPC without a request; return when the server has ended those beyond ``places``."""
    silent = [stack.enter_context(RawConnection(target.port)) for _ in range(4)]
    for client in silent * 100:
        client.call(f"/{SERVICE}/{path}")
    until(lambda: sum(len(client.ended) for client in silent) >= 400 - places, what=f"the end of {path}s too many")


def warm(target: Target) -> None:
    """Have the server create all threads and heaps that it creates once, so that they do not count as growth."""
    message = infer_request("mlp", x=np.ones((1, 16), np.float32)).SerializeToString()
    with contextlib.ExitStack() as stack:
        for path, places in _PLACES.items():
            _hold(target, path, places, stack)
    with contextlib.ExitStack() as stack:
        calls: list[Any] = []
        for _ in range(8):  # a connection may have 64 calls open
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = stack.enter_context(grpc.insecure_channel(target.address, options=options))
            calls.append(channel.unary_unary(f"/{SERVICE}/ModelInfer"))
        for _ in range(5):
            sent = [call.future(message) for call in calls for _ in range(50)]
            until(lambda sent=sent: all(done.done() for done in sent), what="the end of a burst")  # type: ignore[misc]


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Target]]:
    """Yield a function that starts a server with these lines of ``server.yaml``; one process for each set of lines."""
    root = tmp_path_factory.mktemp("hostile")
    write_mlp(root / "repository" / "mlp" / "1")
    targets: dict[str, Target] = {}

    with contextlib.ExitStack() as stack:

        def start(settings: str = "") -> Target:
            if settings not in targets:
                file = root / f"server{len(targets)}.yaml"
                file.write_text(settings)
                server = stack.enter_context(ServerProcess("--repository", root / "repository", "--config", file))
                targets[settings] = Target(server.wait_ready())
                warm(targets[settings])
            return targets[settings]

        yield start


@pytest.fixture(scope="session", autouse=True)
def many_sockets() -> None:
    """Raise the limit of file descriptors: the attacks of this folder hold hundreds of sockets in this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[HealthMonitor]:
    """Yield a server whose /livez is probed during the test, and must respond within a second each time."""
    write_mlp(tmp_path / "repository" / "mlp" / "1")
    with ServerProcess("--repository", tmp_path / "repository") as server:
        server.wait_ready()
        server.get("/")
        for _ in range(3):  # so that pages, and the heap for 256 connections, do not count as growth
            with contextlib.ExitStack() as stack:
                for _ in range(256):
                    peer = stack.enter_context(socket.create_connection(("127.0.0.1", server.ports()[1]), timeout=10))
                    peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        server.get("/metrics")
        with HealthMonitor(server, over_http, repeat=False).running() as monitor:
            yield monitor
        assert "Traceback" not in server.log


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record on which commit each attack ran and whether it passed, for the documentation page."""
    report = yield
    if report.when == "setup":
        figures.record(commit=figures.commit())
    if report.when == "call":
        figures.record(passed=report.passed)
    return report
