"""The Grafana dashboard is valid by Grafana's schema, equals what its source writes, and queries only what exists."""

import json
import re
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from dashboard import FILE, board, queries
from exposed import everything_exposed
from promql import counted, grouped
from scraped import Scraped
from typed import mistyped

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules"
needs_schema = pytest.mark.skipif(
    find_spec("grafana_foundation_sdk") is None, reason="grafana-foundation-sdk is not installed (make setup has it)"
)


def scraped() -> Scraped:
    groups = [group for path in RULES.glob("*.yml") for group in yaml.safe_load(path.read_text("utf-8"))["groups"]]
    return Scraped(everything_exposed(), [rule for group in groups for rule in group["rules"]])


@needs_schema
def test_the_file_is_what_its_source_writes() -> None:
    from board import board as written  # imported here because it needs the schema

    assert FILE.read_text("utf-8") == written(), "run python deploy/grafana/board.py"


@needs_schema
def test_grafanas_schema_has_every_field_and_drops_none() -> None:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    read = Dashboard.from_json(board())
    assert json.loads(JSONEncoder().encode(read)) == board()
    assert list(mistyped(read, Dashboard)) == []


@pytest.mark.parametrize(("title", "expression"), list(queries()), ids=[title for title, _ in queries()])
def test_a_query_names_only_metrics_labels_and_values_that_exist(title: str, expression: str) -> None:
    assert scraped().unknown(expression) == []


def test_panels_have_unique_names_and_do_not_overlap() -> None:
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert not any(_overlap(one, other) for one, other in combinations(places, 2))
    assert all(place["x"] + place["w"] <= 24 for place in places)


def _overlap(a: dict[str, int], b: dict[str, int]) -> bool:
    beside = a["x"] >= b["x"] + b["w"] or b["x"] >= a["x"] + a["w"]
    return not (beside or a["y"] >= b["y"] + b["h"] or b["y"] >= a["y"] + a["h"])


def test_every_panel_uses_the_chosen_data_source() -> None:
    for panel in board()["panels"]:
        for part in (panel, *panel.get("targets", ())):
            if panel["type"] != "row":
                assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_a_legend_names_only_labels_that_its_query_keeps() -> None:
    """Grafana writes an empty string for a label that is missing."""
    for panel in board()["panels"]:
        for target in panel.get("targets", ()):
            wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            kept = grouped(target["expr"])
            assert not kept or wanted <= kept | counted(target["expr"]), panel["title"]
