"""The documentation matches the code: names of metrics, reasons of rejections, configuration keys."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from exposed import everything_exposed

from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.models.serving import Serving
from bf16kit.service.request import REFUSALS

DOCS = Path(__file__).parents[2] / "docs"


def first_cells(page: str) -> list[str]:
    """Return the names in the first column of every table of a page."""
    rows = re.findall(r"^\| (`[^|]+) \|", (DOCS / page).read_text("utf-8"), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row)]


def documented_metrics() -> dict[str, tuple[str, set[str]]]:
    """Return the type and the labels of every metric in the table of the page, by name."""
    page = (DOCS / "metrics.md").read_text("utf-8")
    found = {}
    for names, types, labels in re.findall(r"^\| (`bf16kit_[^|]+) \| ([^|]+) \| ([^|]*)\|", page, re.MULTILINE):
        kinds = re.findall(r"gauge|counter|histogram", types)
        for at, name in enumerate(re.findall(r"`(\w+)`", names)):
            kind = kinds[min(at, len(kinds) - 1)]
            has_labels = kind == "counter" or "(counter)" not in labels
            of_model = set() if "no model" in labels + types else {"model", "version"}
            found[name] = kind, of_model | (set(re.findall(r"`(\w+)`", labels)) if has_labels else set())
    return found


def test_every_metric_is_documented_with_its_type_and_labels_and_every_documented_metric_exists() -> None:
    text = everything_exposed()
    labels: dict[str, set[str]] = {}
    for name, pairs in re.findall(r"^(bf16kit_\w+)\{(.*)\} \S+$", text, re.MULTILINE):
        labels.setdefault(re.sub(r"_(bucket|sum|count)$", "", name), set()).update(re.findall(r'(\w+)="', pairs))
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    ours = {name: kind for name, kind in types.items() if name.startswith("bf16kit_")}
    assert {name: (kind, labels.get(name, set()) - {"le"}) for name, kind in ours.items()} == documented_metrics()
    page = (DOCS / "metrics.md").read_text("utf-8")
    assert set(re.findall(r"`((?:process|python)_[a-z_]+)`", page)) <= set(types)


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
