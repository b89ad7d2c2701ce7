from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from artifacts import write_mlp
from controlled import Controlled
from waiting import until

from bf16kit.messages.errors import ConfigError
from service.http.pages import Page, Route, routes
from service.http.server import HttpServer
from service.http.views import StatusReader
from service.telemetry.history import History
from service.telemetry.metrics import Metrics
from service.telemetry.readings import NAMES


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Controlled]:
    write_mlp(tmp_path / "mlp" / "1")
    write_mlp(tmp_path / "spoilt" / "1", spoil=0.5)
    repository = Controlled(tmp_path, Metrics(), device="cpu", threads=1)
    repository.scan()
    yield repository
    repository.close()


@pytest.fixture
def server(repository: Controlled) -> Iterator[HttpServer]:
    metrics = Metrics()
    status = StatusReader(repository, History(lambda: metrics.samples(NAMES)))
    server = HttpServer("127.0.0.1", 0, routes(repository, metrics, status.snapshot))
    server.start()
    yield server
    server.close()


def get(server: HttpServer, path: str, method: str = "GET") -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read().decode()
    finally:
        connection.close()


def load(repository: Controlled) -> None:
    repository.start()
    until(lambda: all(model.state != "loading" for model in repository.models()))


def test_livez_is_200_while_models_load(server: HttpServer) -> None:
    assert get(server, "/livez")[::2] == (200, "live\n")


def test_readyz_is_503_until_every_model_is_ready(server: HttpServer, repository: Controlled) -> None:
    assert get(server, "/readyz")[0] == 503
    load(repository)
    assert get(server, "/readyz")[0] == 503  # one of the two is over budget


def test_metrics_are_served_as_prometheus_text(server: HttpServer) -> None:
    status, headers, body = get(server, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    assert "# TYPE bf16kit_requests_total counter" in body


def test_the_status_page_shows_each_model_and_why_one_is_not_ready(server: HttpServer, repository: Controlled) -> None:
    load(repository)
    status, headers, body = get(server, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "mlp ·\u00a0version\u00a01" in body
    assert "onnxruntime on cpu" in body
    assert "golden samples within budget (y relative_l2" in body
    assert "golden samples are over the drift budget: output &#x27;y&#x27;" in body
    assert "//" not in body.replace("http://www.w3.org/2000/svg", "")  # an XML name, not an address


def test_a_head_request_has_the_headers_and_no_body(server: HttpServer) -> None:
    status, headers, body = get(server, "/livez", "HEAD")
    assert (status, headers["Content-Length"], body) == (200, "5", "")


@pytest.mark.parametrize("path", ["/nope", "/metrics/", "/../etc/passwd", "/%2e%2e/"])
def test_an_unknown_path_is_404_with_the_list_of_pages(server: HttpServer, path: str) -> None:
    status, _, body = get(server, path)
    assert (status, body) == (404, "not found; the pages are /metrics, /livez, /readyz, /status.json, /watch, /\n")


def test_other_methods_are_rejected(server: HttpServer) -> None:
    assert get(server, "/metrics", "DELETE")[0] == 405


def test_a_port_in_use_is_reported_before_any_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use .* --http-port"):
            HttpServer("127.0.0.1", port, {})


def test_an_address_of_another_machine_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 port 0"):
        HttpServer("192.0.2.1", 0, {})


def test_a_page_that_fails_is_500_and_its_text_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: str) -> Page:
        raise RuntimeError("secret")

    server = HttpServer("127.0.0.1", 0, {"/metrics": Route(broken)})
    server.start()
    try:
        status, _, body = get(server, "/metrics")
    finally:
        server.close()
    assert (status, body) == (500, "internal error; the server's log has the details\n")
    assert "secret" in caplog.text


def test_the_status_is_also_served_as_json(server: HttpServer, repository: Controlled) -> None:
    load(repository)
    status, headers, body = get(server, "/status.json")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    states = {model["name"]: model["state"] for model in json.loads(body)["models"]}
    assert states == {"mlp": "ready", "spoilt": "unavailable"}


def test_the_page_that_refreshes_itself_has_its_own_path(server: HttpServer) -> None:
    assert 'http-equiv="refresh"' in get(server, "/watch")[2]
    assert 'http-equiv="refresh"' not in get(server, "/")[2]


def test_only_livez_and_readyz_are_probes(repository: Controlled) -> None:
    metrics = Metrics()
    status = StatusReader(repository, History(lambda: metrics.samples(NAMES)))
    paths = routes(repository, metrics, status.snapshot)
    assert {path for path, route in paths.items() if route.probe} == {"/livez", "/readyz"}


def test_a_page_may_load_nothing_and_not_be_framed(server: HttpServer) -> None:
    policy = get(server, "/")[1]["Content-Security-Policy"]
    for directive in ("default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"):
        assert directive in policy
