"""The metric that the HPA needs is what the Prometheus adapter computes from real scrapes of a real server."""

from pathlib import Path
from typing import Any

import numpy as np
import prometheusprocess
import pytest
import yaml
from manifests import DEPLOY, EVERYTHING, charted, needs_tools, one
from prometheusprocess import Prometheus
from serverprocess import ServerProcess
from waiting import until

from bf16kit.service.telemetry.families import SECONDS

RULES = yaml.safe_load((DEPLOY / "helm" / "prometheus-adapter.yaml").read_text("utf-8"))["rules"]["custom"]
POD = {"namespace": "bf16kit", "pod": "bf16kit-7d4b9c-x2x7l"}
DELAY_MS = 80  # every request waits this long for others, which never come


def asked() -> str:
    """Return the query that the adapter builds for the pod, according to its documentation."""
    (rule,) = RULES
    series = rule["name"]["matches"].strip("^$")
    query: str = rule["metricsQuery"]
    for name, value in (
        ("Series", series),
        ("LabelMatchers", f'namespace="{POD["namespace"]}",pod="{POD["pod"]}"'),
        ("GroupBy", "pod"),
    ):
        query = query.replace(f"<<.{name}>>", value)
    assert "<<" not in query
    return query


@needs_tools
def test_the_hpa_uses_the_rules_metric_and_its_target_is_a_bucket_bound() -> None:
    (rule,) = RULES
    metrics = one(charted(*EVERYTHING), "HorizontalPodAutoscaler")["spec"]["metrics"]
    (pods,) = [each["pods"] for each in metrics if "pods" in each]
    assert pods["metric"]["name"] == rule["name"]["as"]
    target = float(pods["target"]["averageValue"].removesuffix("m")) / 1000
    assert target in SECONDS  # a bucket bound: the histogram distinguishes values on either side of it
    assert rule["resources"]["overrides"].keys() == POD.keys()


@pytest.fixture(scope="module")
def serving() -> str:
    return f"max_queue_delay_ms: {DELAY_MS}\n"


@pytest.mark.long  # a rate needs some seconds of scrapes
@prometheusprocess.needed
def test_the_rule_gives_a_pods_wait_and_zero_if_it_is_idle(server: ServerProcess, tmp_path: Path) -> None:
    with Prometheus(server.ports()[1], tmp_path / "own", labels=POD) as prometheus:

        def told(query: str) -> list[Any]:
            return [(each["pod"], float(each[""])) for each in prometheus.query(query)]

        (rule,) = RULES
        until(lambda: prometheus.ask("series", **{"match[]": rule["seriesQuery"]}), 30, "the series that it looks for")
        quantile = asked().partition(" >= 0")[0]
        until(lambda: told(quantile), 30, "two scrapes")
        assert np.isnan(told(quantile)[0][1])  # the adapter would pass NaN on as a number
        assert told(asked()) == [(POD["pod"], 0.0)]

        def waits() -> bool:
            server.infer("mlp", {"x": np.ones((4, 16), np.float32)})
            ((pod, seconds),) = told(asked())
            assert pod == POD["pod"]
            return bool(seconds > 0)

        until(waits, 60, "a wait")
        ((_, seconds),) = told(asked())
        assert DELAY_MS / 1000 / 2 < seconds <= 10  # a histogram gives the bounds of the bucket only
