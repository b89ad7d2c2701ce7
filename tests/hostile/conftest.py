"""Servers to attack: processes with their defaults, or with what a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from artifacts import write_mlp
from attacked import Target
from serverprocess import ServerProcess


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
