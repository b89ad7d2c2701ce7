"""The Grafana dashboard's queries, as Prometheus gets them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "deploy" / "grafana" / "bf16kit.json"
# What a variable stands for when everything is chosen, as in the file; the interval is that of a quick scrape.
_VARIABLES = {"$job": ".*", "$instance": ".*", "$model": ".*", "$__rate_interval": "30s"}


def board() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return loaded


def queries() -> Iterator[tuple[str, str]]:
    """The title of a panel, and one of its expressions with every variable replaced."""
    for panel in board()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], filled_in(target["expr"])


def filled_in(expression: str) -> str:
    for variable, value in _VARIABLES.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return expression
