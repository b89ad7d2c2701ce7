from collections.abc import Iterator
from pathlib import Path

import pytest
from artifacts import write_mlp
from click.testing import CliRunner, Result
from commanded import Run
from ownlog import restored_log

from bf16kit.service.cli import main


@pytest.fixture
def run() -> Iterator[Run]:
    """Yield a function that runs ``bf16-serve`` in this process; the logging set-up is restored afterwards."""

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    with restored_log():
        yield invoke


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with versions 1 and 2 of a model ``mlp``."""
    root = tmp_path / "repository"
    for version in ("1", "2"):
        write_mlp(root / "mlp" / version)
    return root
