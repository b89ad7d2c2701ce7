"""Servers for the conformance suite: real server processes over artifacts with every datatype."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from artifacts import write_kinds, write_mlp, write_typed, write_words
from serverprocess import ServerProcess


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository of models that take every datatype, with one version and with two."""
    directory = tmp_path_factory.mktemp("repository")
    write_mlp(directory / "mlp" / "1")
    write_mlp(directory / "mlp" / "3")
    (directory / "mlp" / "serving.yaml").write_text("version_policy: all\n")
    write_kinds(directory / "kinds" / "1")
    write_typed(directory / "typed" / "1")
    write_words(directory / "words" / "1")
    return directory


@pytest.fixture(scope="module")
def served(repository: Path) -> Iterator[ServerProcess]:
    """Yield ``bf16-serve`` with its defaults."""
    with ServerProcess("--repository", repository) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module", params=["1", "2"], ids=["one process", "two processes"])
def opened(repository: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """Yield ``bf16-serve`` with every feature on that is off by default, in one process and in two."""
    explicit = ("--workers", request.param, "--model-control", "explicit", "--load-model", "*")
    with ServerProcess("--repository", repository, *explicit, env={"BF16KIT_SHARED_MEMORY": "true"}) as server:
        yield server.wait_ready()
