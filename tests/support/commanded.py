"""The operator's commands, run in this process as ``bf16-serve`` would run them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from click.testing import Result

Run = Callable[..., Result]


def read(result: Result) -> dict[str, Any]:
    """The JSON object on the standard output."""
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def one_line(result: Result) -> str:
    """What was said on the standard error, which is one line and no traceback."""
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr
