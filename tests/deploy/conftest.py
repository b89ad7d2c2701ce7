"""A small model to serve, and a server of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from artifacts import write_mlp
from serverprocess import ServerProcess


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("repository")
    write_mlp(repository / "mlp" / "1", logits=True)
    return repository


@pytest.fixture(scope="module")
def server(repository: Path, serving: str) -> Iterator[ServerProcess]:
    """Yield a server of the model; the test's module has a fixture ``serving``, the text of its ``serving.yaml``."""
    (repository / "mlp" / "serving.yaml").write_text(serving)
    with ServerProcess("--repository", repository) as server:
        yield server.wait_ready()
