"""A volume with a damaged model, and a server that cannot be scraped: what the server, Docker and Prometheus report."""

import shutil
from collections.abc import Iterator

import pytest
import tritonclient.grpc as triton
import yaml
from composing import ROOT, SERVICES, Stack
from prometheusprocess import hasty
from waiting import until

pytestmark = pytest.mark.compose
_WEIGHTS = "/models/minilm/1/weights.bf16"
_FLIP = """
import pathlib
path = pathlib.Path('{path}')
data = bytearray(path.read_bytes())
data[len(data) // 2] ^= 1
path.write_bytes(data)
"""


@pytest.fixture(scope="module")
def watched(stack: Stack) -> Iterator[Stack]:
    """Yield the same stack with alerts that fire as soon as they are true: promtool's tests check their durations."""
    where = ROOT / "build" / stack.project
    shutil.copytree(ROOT / "deploy" / "prometheus", where / "prometheus")
    for path in (where / "prometheus" / "rules").glob("*.yml"):
        path.write_text(hasty(path), "utf-8")
    over = {"services": {"prometheus": {"volumes": [f"{where}/prometheus:/etc/prometheus:ro"]}}}
    (where / "hasty.yaml").write_text(yaml.safe_dump(over), "utf-8")
    watched = stack.and_file(where / "hasty.yaml")
    try:
        watched.up("--no-deps", "prometheus")
        until(lambda: watched.health("prometheus") == "healthy", 60, "Prometheus")
        yield watched
    finally:
        stack.up(*SERVICES)
        shutil.rmtree(where)


def test_log_health_check_and_alert_report_a_flipped_bit_in_the_volume(
    watched: Stack, client: triton.InferenceServerClient
) -> None:
    """The running server continues with its copy of the weights; the next start detects the damage."""
    assert client.is_model_ready("minilm")
    watched.python(_FLIP.format(path=_WEIGHTS))
    assert client.is_model_ready("minilm")
    watched.compose("restart", "server")
    try:
        until(lambda: watched.get("/readyz")[0] == 503, 60, "the server's answer that it is not ready")
        until(lambda: "its sha256 is" in watched.get("/status.json")[1], 60, "the reason on the status page")
        error = next(line for line in watched.log("server").splitlines() if "its sha256 is" in line)
        assert "ERROR" in error
        assert _WEIGHTS in error
        assert "copy or convert the artifact again" in error
        assert watched.get("/livez")[0] == 200
        until(lambda: not client.is_server_ready(), 60, "an answer on the gRPC port")
        assert not client.is_model_ready("minilm")
        until(lambda: "Bf16ModelNotReady" in watched.firing(), 60, "the alert")
        until(lambda: "Bf16ServerDown" not in watched.firing(), 60, "the end of the alert on the restart")
        until(lambda: watched.health("server") == "unhealthy", 90, "Docker's verdict")
    finally:
        watched.python(_FLIP.format(path=_WEIGHTS))
        watched.compose("restart", "server")
    until(lambda: watched.get("/readyz")[0] == 200, 60, "readiness with the bit as it was")
    until(lambda: "Bf16ModelNotReady" not in watched.firing(), 60, "the end of the alert")


def test_an_alert_reports_a_server_that_cannot_be_scraped(watched: Stack) -> None:
    watched.compose("stop", "server")
    try:
        until(lambda: "Bf16ServerDown" in watched.firing(), 60, "the alert")
    finally:
        watched.compose("start", "server")
    until(lambda: watched.query("bf16kit_model_ready") == [1.0], 60, "readiness, as Prometheus sees it")
    # Those of the loading model, too: what a rule recorded last holds for five minutes where Prometheus restarts.
    loading = {"Bf16ServerDown", "Bf16ReferenceDown", "Bf16ModelNotReady", "Bf16VersionNotReady"}
    until(lambda: not loading & watched.firing(), 120, "the end of the alerts")
