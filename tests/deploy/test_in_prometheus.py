"""Rules and dashboard in a real Prometheus that scrapes a real server under real requests."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import prometheusprocess
import pytest
import yaml
from converting import ONNX_ONLY, process
from dashboard import queries
from prometheusprocess import RULES, Prometheus
from serverprocess import ServerProcess
from waiting import until

import graphs

pytestmark = [pytest.mark.long, prometheusprocess.needed]  # rates need some seconds of scrapes
MEASURED = 'bf16kit_drift_samples_total{model="mlp",outcome="measured",version="1"}'
EMPTY = {"Cause", "Rejected requests"}  # panels without data if the model is healthy

SLOW = "bf16kit:requests_slow:ratio_rate5m"


def written() -> list[dict[str, Any]]:
    """Return all rules of all files."""
    groups = [group for path in RULES.glob("*.yml") for group in yaml.safe_load(path.read_text("utf-8"))["groups"]]
    return [rule for group in groups for rule in group["rules"]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yield a server of a converted model of logits, with a baseline, that measures every response."""
    repository = tmp_path_factory.mktemp("repository")
    source = tmp_path_factory.mktemp("source") / "mlp.onnx"
    onnx.save(graphs.mlp(), source)
    feeds = tmp_path_factory.mktemp("samples")  # the converter records input ranges only for given samples
    for seed in range(8):
        np.savez(feeds / f"{seed}.npz", x=np.random.default_rng(seed).standard_normal((4, 16)).astype(np.float32))
    # The top class changes in one row of fifty, because these logits are noise.
    options = ("--output", "y:logits", "--budget", "top1_agreement=0.5", "--profile", "cpu", "--samples", feeds)
    process("checkpoint", source, "--out", repository / "mlp" / "1", *options, *ONNX_ONLY).published()
    (repository / "mlp" / "serving.yaml").write_text("shadow: {rate: 1.0, max_per_second: 1000}\n")
    with ServerProcess("--repository", repository) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def prometheus(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Yield a Prometheus that has seen drift of 250 requests, enough for the fleet's interval, and enough scrapes."""
    with Prometheus(server.ports()[1], tmp_path_factory.mktemp("prometheus") / "own") as prometheus:

        def asked_and_rated() -> bool:
            for _ in range(20):
                server.infer("mlp", {"x": np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)})
            return bool(prometheus.query(f"rate({MEASURED}[30s]) > 0 and {MEASURED} > 1000 and on (model) {SLOW}"))

        until(asked_and_rated, 120, "a rate of measured samples")
        yield prometheus


def test_every_query_of_the_dashboard_has_a_result(prometheus: Prometheus) -> None:
    """The test waits: a rate needs two scrapes of a series, which may have begun a moment ago."""
    until(
        lambda: {title for title, query in queries() if not prometheus.query(query)} <= EMPTY, 60, "an answer of each"
    )


def test_every_rule_is_evaluated_and_nothing_fires(prometheus: Prometheus) -> None:
    def health() -> list[str]:
        return [rule["health"] for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    until(lambda: "unknown" not in health(), 30, "an evaluation of each rule")
    assert health() == ["ok"] * len(written())
    assert prometheus.query("bf16kit:requests_slow:ratio_rate5m")
    assert prometheus.firing() == set()
