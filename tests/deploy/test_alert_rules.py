"""The alert rules: promtool accepts them; each is tested and explained, and uses only metrics that exist."""

import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from exposed import everything_exposed
from promql import selectors
from scraped import CLUSTER, Scraped

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "prometheus"
RULES = sorted((DEPLOY / "rules").glob("*.yml"))
TESTS = sorted((DEPLOY / "tests").glob("*.yml"))
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool on PATH (Debian: apt-get install prometheus)")


def rules() -> Iterator[dict[str, Any]]:
    for path in RULES:
        for group in yaml.safe_load(path.read_text("utf-8"))["groups"]:
            yield from group["rules"]


ALL = list(rules())
ALERTS = [rule for rule in ALL if "alert" in rule]
NAMES = sorted({rule["alert"] for rule in ALERTS})


def promtool(*arguments: str) -> None:
    done = subprocess.run([str(PROMTOOL), *arguments], capture_output=True, text=True, cwd=DEPLOY, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", *map(str, RULES))
    promtool("check", "config", "prometheus.yml")


@pytest.mark.long
@needs_promtool
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_alerts_fire_as_their_promtool_tests_expect(path: Path) -> None:
    promtool("test", "rules", str(path))


def test_prometheus_loads_every_file_of_rules() -> None:
    """promtool checks the files that a configuration names, and also accepts a configuration that names none."""
    (pattern,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))["rule_files"]
    assert sorted(DEPLOY.glob(pattern)) == RULES != []


def test_every_alert_has_a_test_that_fires_it_and_one_that_does_not() -> None:
    shown: dict[str, set[bool]] = defaultdict(set)
    for path in TESTS:
        for case in yaml.safe_load(path.read_text("utf-8"))["tests"]:
            for look in case.get("alert_rule_test", ()):
                shown[look["alertname"]].add(bool(look["exp_alerts"]))
    assert [name for name in NAMES if shown[name] != {True, False}] == []


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_has_severity_summary_description_and_runbook(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning")
    notes = alert["annotations"]
    assert {"summary", "description", "runbook"} == set(notes)
    assert len(notes["summary"]) < 120
    assert notes["runbook"] == f"docs/runbook.md#{alert['alert'].lower()}"


def test_the_runbook_has_a_heading_for_every_alert_and_no_other() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text("utf-8")
    assert sorted(re.findall(r"^### (Bf16\w+)$", page, re.MULTILINE)) == NAMES


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_names_only_metrics_labels_and_values_that_exist(rule: dict[str, Any]) -> None:
    assert Scraped(everything_exposed(), ALL).unknown(rule["expr"]) == []


def test_the_series_in_the_rules_tests_exist() -> None:
    """An alert that is tested on a metric of another name never fires in production."""
    there = Scraped(everything_exposed())
    free = ("model", "version", "job", "instance", "output", "metric", "device", "profile", "backend", "precision")
    for path in TESTS:
        for case in yaml.safe_load(path.read_text("utf-8"))["tests"]:
            for series in case["input_series"]:
                (selector,) = selectors(series["series"])
                wanted = there.labels[selector.metric]
                assert there.unknown(series["series"], (*free, "accumulation", "input")) == []
                assert selector.labels - CLUSTER == wanted, series["series"]
