"""The Grafana dashboard's queries as Prometheus receives them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "deploy" / "grafana" / "bf16kit.json"
# The value of each variable if everything is selected, as in the file. The interval suits frequent scrapes.
_VARIABLES = {"$job": ".*", "$instance": ".*", "$model": ".*", "$__rate_interval": "30s"}


def board() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return loaded


def queries() -> Iterator[tuple[str, str]]:
    """Yield each expression of each panel, with every variable replaced, after the panel's title."""
    for panel in board()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], filled_in(target["expr"])


def filled_in(expression: str) -> str:
    for variable, value in _VARIABLES.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return expression
