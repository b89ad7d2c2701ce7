"""The pages for programs: probes, metrics, ``/status.json`` and ``/evidence``, from a real repository or a registry."""

import http.client
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from artifacts import write_mlp
from controlled import Controlled
from exposed import everything
from loopback import LoopbackModel, LoopbackRegistry
from waiting import until

from bf16kit.messages.errors import NotFound, Unavailable
from bf16kit.service.config.tokens import TokenFile
from bf16kit.service.http.httpserver import HttpServer
from bf16kit.service.http.pages import Access, Fetch, StatusReader, evidence_route, routes
from bf16kit.service.telemetry.families import OF_MODEL
from bf16kit.service.telemetry.metrics import Metrics, samples

MANAGE, READ = "manager-0123456789abcdef", "reader-0123456789abcdef"
Open = Callable[..., HttpServer]


@pytest.fixture
def serve() -> Iterator[Open]:
    servers: list[HttpServer] = []

    def start(registry: Any, metrics: Metrics, fetch: Fetch | None = None, access: Access | None = None) -> HttpServer:
        status = StatusReader(registry, lambda: samples(metrics.values()))
        pages = routes(registry, metrics.expose, status.snapshot, evidence_route(registry, fetch))
        servers.append(HttpServer("127.0.0.1", 0, pages, access=access))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def get(server: HttpServer, path: str, token: str = "") -> tuple[int, str, str]:
    """Return the status, the content type and the body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        response = connection.getresponse()
        return response.status, response.headers["content-type"], response.read().decode()
    finally:
        connection.close()


def test_a_server_whose_models_load(serve: Open, tmp_path: Path) -> None:
    """It is live from the start, ready only when every model is, and ``/status.json`` says what is wrong."""
    write_mlp(tmp_path / "mlp" / "1")
    write_mlp(tmp_path / "spoilt" / "1", spoil=0.5)
    metrics = Metrics()
    repository = Controlled(tmp_path, metrics, device="cpu", threads=1)
    repository.scan()
    try:
        server = serve(repository, metrics)
        assert get(server, "/livez")[::2] == (200, "live\n")
        assert get(server, "/readyz")[::2] == (503, "not ready; see / for the reason\n")
        repository.start()
        until(lambda: all(model.state != "loading" for model in repository.models()))
        assert get(server, "/readyz")[0] == 503  # one of the two is over budget
        status, kind, body = get(server, "/status.json")
    finally:
        repository.close()
    assert (status, kind) == (200, "application/json")
    seen = json.loads(body)
    mlp, spoilt = seen["models"]
    assert (mlp["name"], mlp["state"], spoilt["state"], seen["ready"]) == ("mlp", "ready", "unavailable", False)
    assert "golden samples are over the drift budget: output 'y'" in spoilt["reason"]
    assert mlp["running"]["golden"].startswith("golden samples within budget (y relative_l2")
    assert (mlp["running"]["backend"], mlp["running"]["inputs"]) == ("onnxruntime", ["x: FP32 [batch,16]"])
    assert mlp["metrics"]["bf16kit_golden_gate_passed"] == 1


def test_metrics_are_prometheus_text_and_the_page_points_to_the_data_where_no_script_runs(serve: Open) -> None:
    server = serve(LoopbackRegistry([]), Metrics())
    status, kind, body = get(server, "/metrics")
    assert (status, kind.startswith("text/plain; version=")) == (200, True)
    assert "# TYPE bf16kit_requests_total counter" in body
    status, kind, body = get(server, "/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    (instead,) = re.findall("<noscript>(.*?)</noscript>", body, re.DOTALL)
    assert 'href="status.json"' in instead
    assert 'href="metrics"' in instead
    elsewhere_or_inline = r"\b(src|style|on[a-z]+)=|https?://(?!www\.w3\.org)"
    assert not re.search(elsewhere_or_inline, body)


def test_only_livez_and_readyz_are_open_to_everybody() -> None:
    nothing: Any = None
    paths = routes(nothing, nothing, nothing)
    assert {path for path, route in paths.items() if route.probe} == {"/livez", "/readyz"}


def test_the_status_has_every_series_of_a_model_by_the_values_of_its_labels() -> None:
    registry = LoopbackRegistry([LoopbackModel("m"), LoopbackModel("new", state="loading")])
    counted = samples(everything().values())
    reader = StatusReader(registry, lambda: counted, workers=2, off_reason=lambda name, version: f"{name} is off")
    reader.listening(8001, 8002)
    seen = json.loads(json.dumps(reader.snapshot(), allow_nan=False))
    model, other = seen["models"]
    left_out = {"batch_rows", "drift_relative_l2", "drift_cosine_distance", "drift_max_abs", "drift_pooled_total"}
    named = {re.sub("^bf16kit_|_(bucket|count|sum)$", "", name) for name in model["metrics"]}
    assert named == OF_MODEL.keys() - left_out
    assert model["metrics"]["bf16kit_drift_budget_ratio"]["y"] == {"relative_l2": 0.4, "slice_error": 0.1}
    assert model["metrics"]["bf16kit_drift_worst_slice_index"] == {"y": 3}
    assert model["metrics"]["bf16kit_request_duration_seconds_bucket"]["+Inf"] == 0
    assert seen["rejected_early"]["in_flight"] == 0
    assert (other["running"], other["metrics"], other["reference_off"]) == (None, {}, "new is off")
    assert (seen["workers"], seen["grpc_port"], seen["http_port"]) == (2, 8001, 8002)


def test_an_infinity_is_a_word() -> None:
    metrics = Metrics()
    metrics.add("echo", 1).budget_ratio("y", "relative_l2", 0.3, 0.0, float("inf"))
    (model,) = StatusReader(LoopbackRegistry([LoopbackModel()]), lambda: samples(metrics.values())).snapshot()["models"]
    assert model["metrics"]["bf16kit_drift_budget_ratio_high"] == {"y": {"relative_l2": "inf"}}


# --- evidence ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def evidence(serve: Open, tmp_path: Path) -> Callable[[Fetch | None], HttpServer]:
    """Return a function that starts a server of model ``m``, versions 1 and 3, with two tokens."""
    (tmp_path / "tokens").write_text(f"{MANAGE} manage\n{READ} read,infer\n")
    (tmp_path / "tokens").chmod(0o600)
    registry = LoopbackRegistry([LoopbackModel("m"), LoopbackModel("m", version=3)])
    return lambda fetch: serve(registry, Metrics(), fetch, Access(TokenFile(tmp_path / "tokens")))


def payload(model: str, version: int) -> bytes:
    return f"the payload of {model} {version}".encode()


def test_a_client_with_the_scope_manage_gets_evidence_and_the_log_records_it(
    evidence: Open, caplog: pytest.LogCaptureFixture
) -> None:
    server = evidence(payload)
    assert get(server, "/evidence?model=m&version=1", MANAGE)[::2] == (200, "the payload of m 1")
    assert get(server, "/evidence?model=m", MANAGE)[::2] == (200, "the payload of m 3"), "without a version the newest"
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said[0].startswith("model 'm' version 1: sending the evidence of its last breach, 18 bytes")
    assert "payload" not in caplog.text


@pytest.mark.parametrize("fetch", [payload, None])
def test_other_clients_get_no_evidence_and_do_not_learn_whether_there_is_any(
    evidence: Open, fetch: Fetch | None
) -> None:
    server = evidence(fetch)
    for token, status in (("", 401), ("unknown-0123456789abcdef", 401), (READ, 403)):
        found, _, body = get(server, "/evidence?model=m", token)
        assert (found, "payload" in body) == (status, False)
    found, _, body = get(server, "/evidence?model=m", MANAGE)
    assert found == (200 if fetch else 404)
    assert fetch or body.startswith("evidence is off: start the server with --evidence")


def test_an_invalid_query_gets_a_one_line_error(evidence: Open) -> None:
    server, many = evidence(payload), "&".join(f"a{i}=1" for i in range(20))
    for query, status, words in (
        ("", 400, "request /evidence?model=NAME"),
        ("?version=1", 400, "request /evidence?model=NAME"),
        ("?model=m&model=n", 400, "request /evidence?model=NAME"),
        ("?model=m&rows=1", 400, "'rows' is not a parameter of this page"),
        ("?model=m&version=one", 400, "version"),
        ("?model=nobody", 404, "unknown model 'nobody'"),
        (f"?{many}", 400, "request /evidence?model=NAME"),
    ):
        found, _, body = get(server, f"/evidence{query}", MANAGE)
        assert (found, words in body, body.count("\n")) == (status, True, 1), query


@pytest.mark.parametrize(("error", "status"), [(NotFound("no breach yet"), 404), (Unavailable("it has ended"), 503)])
def test_an_error_in_fetching_evidence_is_the_response(evidence: Open, error: Exception, status: int) -> None:
    def fetch(model: str, version: int) -> bytes:
        raise error

    assert get(evidence(fetch), "/evidence?model=m", MANAGE)[::2] == (status, f"{error}\n")
