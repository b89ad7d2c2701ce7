"""Helpers for tests that run the operator's commands in this process, as ``bf16-serve`` runs them."""

import json
from collections.abc import Callable
from typing import Any

from click.testing import Result

Run = Callable[..., Result]


def read(result: Result) -> dict[str, Any]:
    """Return the JSON object on the standard output."""
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def one_line(result: Result) -> str:
    """Return the standard error after asserting that it is one line, and so not a traceback."""
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr
