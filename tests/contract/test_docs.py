"""The documentation matches the code: names of metrics, reasons of rejections, configuration keys."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from service.config.serverconfig import ServerConfig
from service.models.serving import Serving
from service.request import REFUSALS
from service.telemetry.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs"


def first_cells(page: str) -> list[str]:
    """Return the names in the first column of every table of a page."""
    rows = re.findall(r"^\| (`[^|]+) \|", (DOCS / page).read_text("utf-8"), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row)]


def test_every_metric_is_documented_and_every_documented_metric_exists() -> None:
    exposed = re.findall(r"^# TYPE (\S+)", Metrics().expose()[0].decode(), re.MULTILINE)
    documented = [name for name in first_cells("metrics.md") if name.startswith("bf16kit_")]
    assert sorted(documented) == sorted(name for name in exposed if name.startswith("bf16kit_"))
    page = (DOCS / "metrics.md").read_text("utf-8")
    assert set(re.findall(r"`((?:process|python)_[a-z_]+)`", page)) <= set(exposed)


def test_every_reason_of_a_rejection_is_documented() -> None:
    page = (DOCS / "metrics.md").read_text("utf-8")
    assert [reason for reason in REFUSALS if reason not in page] == []


def test_every_key_of_the_server_is_documented_and_every_documented_key_exists() -> None:
    assert sorted(first_cells("operations.md")) == sorted(ServerConfig.model_fields)


def test_the_serving_yaml_of_the_documentation_is_accepted_and_shows_every_key() -> None:
    page = (DOCS / "operations.md").read_text("utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    shown = yaml.safe_load(example)
    Serving(**shown)
    assert shown.keys() == Serving.model_fields.keys()
