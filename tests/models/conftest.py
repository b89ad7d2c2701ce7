"""The catalogue's models, each converted once, and one server for all of them."""

import functools
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from catalogue import CATALOGUE
from conversions import BUILD, SITE, Convert, convert
from serverprocess import ServerProcess


@pytest.fixture(scope="session")
def site() -> Path:
    """Return the directory of the packages, and let this process import from it."""
    if not SITE.is_dir():
        pytest.fail(f"{SITE} is not there: `make test-models` installs the packages and runs these tests")
    sys.path.append(str(SITE))
    return SITE


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("models")
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def converted(site: Path, repository: Path) -> Convert:
    """Return what converts a model when it is first asked for: all in one test could exceed the time of a test."""
    BUILD.mkdir(parents=True, exist_ok=True)
    return functools.cache(lambda entry: convert(entry, repository))


@pytest.fixture(scope="session")
def server(converted: Convert, repository: Path) -> Iterator[ServerProcess]:
    """Yield one server for all converted models."""
    for entry in CATALOGUE:
        converted(entry)
    with ServerProcess("--repository", repository, "--device", "cpu") as server:
        yield server.wait_ready()
