"""Unmodified clients of other projects, each in its own environment; and a server with models for them."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from artifacts import write_mlp, write_typed, write_words
from serverprocess import ServerProcess

_HERE = Path(__file__).parent
_ENVIRONMENTS = _HERE.parents[1] / "build" / "environments"
Calls = Callable[[str], dict[str, str]]


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Yield ``host:port`` of the server for gRPC, and for REST."""
    repository = tmp_path_factory.mktemp("repository")
    for name in ("mlp", "spare"):
        write_mlp(repository / name / "1")
    write_typed(repository / "typed" / "1")
    write_words(repository / "words" / "1")
    explicit = {"BF16KIT_MODEL_CONTROL": "explicit", "BF16KIT_LOAD_MODEL": '["*"]'}
    with ServerProcess("--repository", repository, "--device", "cpu", "--http-inference", env=explicit) as server:
        yield [f"127.0.0.1:{port}" for port in server.wait_ready().ports()]


@pytest.fixture(scope="session")
def calls(targets: list[str]) -> Calls:
    """Return a function that runs a client's calls and returns the error of each: "" if the call succeeded."""
    made: dict[str, dict[str, str]] = {}

    def call(client: str) -> dict[str, str]:
        python = _ENVIRONMENTS / client.partition("_")[0] / "bin" / "python"
        if not python.exists():
            pytest.skip(f"{client} is not installed: make test-clients does it")
        if client not in made:
            command = [str(python), str(_HERE / f"calls_of_{client}.py"), *targets]
            with_ours = {**os.environ, "PYTHONPATH": str(_HERE.parent / "support")}
            done = subprocess.run(command, env=with_ours, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            made[client] = json.loads(done.stdout.splitlines()[-1])
        return made[client]

    return call
