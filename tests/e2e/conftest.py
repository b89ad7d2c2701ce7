"""Start servers as processes, and end them after the test that started them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from secondjudge import judging_conversions
from serverprocess import Serve, ServerProcess


@pytest.fixture(autouse=True, scope="session")
def _a_second_judge() -> Iterator[None]:
    """Let a second judge check every artifact that the tests convert."""
    with judging_conversions():
        yield


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Yield a function that starts servers on free ports; end these servers after the test."""
    servers: list[ServerProcess] = []

    def start(*arguments: str, env: dict[str, str] | None = None) -> ServerProcess:
        servers.append(ServerProcess("--grpc-port", "0", "--http-port", "0", *arguments, env=env))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
