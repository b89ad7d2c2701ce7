"""The metric that the HPA needs is what the Prometheus adapter computes from real scrapes of a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import prometheusprocess
import pytest
import tritonclient.grpc as triton
import yaml
from converting import ONNX_ONLY, process
from manifests import DEPLOY, EVERYTHING, charted, needs_tools, one
from prometheusprocess import Prometheus
from serverprocess import ServerProcess
from waiting import until

import graphs
from service.telemetry.families import SECONDS

RULES = yaml.safe_load((DEPLOY / "helm" / "prometheus-adapter.yaml").read_text("utf-8"))["rules"]["custom"]
POD = {"namespace": "bf16kit", "pod": "bf16kit-7d4b9c-x2x7l"}
DELAY_MS = 80  # every request waits this long for others, which never come

scraping = pytest.mark.skipif(
    prometheusprocess.find() is None, reason="no prometheus on PATH (Debian: apt-get install prometheus)"
)


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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yield a server whose requests wait in the queue."""
    repository = tmp_path_factory.mktemp("repository")
    source = tmp_path_factory.mktemp("source") / "mlp.onnx"
    onnx.save(graphs.mlp(), source)
    process("checkpoint", source, "--out", repository / "mlp" / "1", "--profile", "cpu", *ONNX_ONLY).published()
    (repository / "mlp" / "serving.yaml").write_text(f"max_queue_delay_ms: {DELAY_MS}\n")
    server = ServerProcess("--grpc-port", "0", "--http-port", "0", "--repository", str(repository))
    try:
        yield server.wait_ready()
    finally:
        server.close()


@pytest.mark.long  # a rate needs some seconds of scrapes
@scraping
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
            _ask(server.target)
            ((pod, seconds),) = told(asked())
            assert pod == POD["pod"]
            return bool(seconds > 0)

        until(waits, 60, "a wait")
        ((_, seconds),) = told(asked())
        assert DELAY_MS / 1000 / 2 < seconds <= 10  # a histogram gives the bounds of the bucket only


def _ask(target: str) -> None:
    tensor = triton.InferInput("x", [4, 16], "FP32")
    tensor.set_data_from_numpy(np.ones((4, 16), np.float32))
    with triton.InferenceServerClient(target) as client:
        client.infer("mlp", [tensor])
