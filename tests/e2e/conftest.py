"""Start servers as processes, and end them after the test that started them."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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
    with ExitStack() as stack:

        def start(*arguments: str | Path, **more: Any) -> ServerProcess:
            return stack.enter_context(ServerProcess(*arguments, **more))

        yield start
