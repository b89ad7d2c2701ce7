"""The catalogue's models, each converted once, and one server for all of them."""

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from catalogue import CATALOGUE
from conversions import MEASURED, SITE, Conversion, convert, line
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
def conversions(site: Path, repository: Path) -> Mapping[str, Conversion]:
    """Convert every model of the catalogue, and record the figures of successful conversions for the table."""
    done = {entry.name: convert(entry, repository) for entry in CATALOGUE}
    MEASURED.write_text("".join(line(conversion) for conversion in done.values() if conversion.code == 0), "utf-8")
    return done


@pytest.fixture(scope="session")
def server(conversions: Mapping[str, Conversion], repository: Path) -> Iterator[ServerProcess]:
    """Yield one server for all converted models."""
    with ServerProcess("--repository", repository, "--device", "cpu") as server:
        yield server.wait_ready()
