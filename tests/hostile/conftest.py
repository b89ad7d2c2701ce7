"""Servers to attack: processes with their defaults, or with what a test says."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from artifacts import write_mlp
from attacked import Target
from serverprocess import ServerProcess
from watched import Watched


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Target]]:
    """Starts a server with the lines of a ``server.yaml`` given; one process for each set of lines."""
    root = tmp_path_factory.mktemp("hostile")
    write_mlp(root / "repository" / "mlp" / "1")
    targets: dict[str, Target] = {}

    def start(settings: str = "") -> Target:
        if settings not in targets:
            file = root / f"server{len(targets)}.yaml"
            file.write_text(settings)
            process = ServerProcess(
                "--repository", str(root / "repository"), "--grpc-port", "0", "--http-port", "0", "--config", str(file)
            )
            targets[settings] = Target(process.wait_ready())
        return targets[settings]

    yield start
    for target in targets.values():
        target.process.close()


Attacked = Callable[..., Watched]


@pytest.fixture(scope="session", autouse=True)
def many_sockets() -> None:
    """The attacks of this folder hold hundreds of sockets in this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Attacked]:
    """Starts a server with these flags and watches it; the end of the test checks what was watched."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str, env: dict[str, str] | None = None) -> Watched:
            write_mlp(tmp_path / "repository" / "mlp" / "1")
            server = ServerProcess(
                "--repository", str(tmp_path / "repository"), "--grpc-port", "0", "--http-port", "0", *flags, env=env
            )
            stack.callback(server.close)
            return stack.enter_context(Watched(server.wait_ready()))

        yield start
