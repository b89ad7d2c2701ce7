"""Frameworks that write the sources and compute expected outputs, each in its own environment (`make test-sources`)."""

from collections.abc import Callable
from pathlib import Path

import pytest

_ENVIRONMENTS = Path(__file__).parents[2] / "build" / "environments"
Environment = Callable[[str], Path]


@pytest.fixture(scope="session")
def environment() -> Environment:
    """Return a function that gives the Python of ``tensorflow``, ``jax`` or ``lightning``, or skips the test."""

    def python(family: str) -> Path:
        found = _ENVIRONMENTS / family / "bin" / "python"
        if not found.exists():
            pytest.skip(f"{family} is not installed: make test-sources does it")
        return found

    return python
