from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from artifacts import write_mlp
from waiting import until

from bf16kit.errors import ConfigError
from service.models.repository import Repository
from service.status_http.pages import Page, Route, routes
from service.status_http.server import HttpServer
from service.telemetry.metrics import Metrics


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    write_mlp(tmp_path / "mlp" / "1")
    write_mlp(tmp_path / "spoilt" / "1", spoil=0.5)
    repository = Repository(tmp_path, Metrics(), device="cpu", threads=1)
    repository.scan()
    yield repository
    repository.close()


@pytest.fixture
def server(repository: Repository) -> Iterator[HttpServer]:
    server = HttpServer("127.0.0.1", 0, routes(repository, Metrics()))
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


def load(repository: Repository) -> None:
    repository.start()
    until(lambda: all(model.state != "loading" for model in repository.models()))


def test_livez_is_200_while_models_load(server: HttpServer) -> None:
    assert get(server, "/livez")[::2] == (200, "live\n")


def test_readyz_is_503_until_every_model_is_ready(server: HttpServer, repository: Repository) -> None:
    assert get(server, "/readyz")[0] == 503
    load(repository)
    assert get(server, "/readyz")[0] == 503  # one of the two is over budget


def test_metrics_are_served_as_prometheus_text(server: HttpServer) -> None:
    status, headers, body = get(server, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    assert "# TYPE bf16kit_requests_total counter" in body


def test_the_status_page_shows_each_model_and_why_one_is_not_ready(server: HttpServer, repository: Repository) -> None:
    load(repository)
    status, headers, body = get(server, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "mlp · version 1" in body
    assert "onnxruntime on cpu, profile cpu" in body
    assert "golden samples are over the drift budget: output &#x27;y&#x27;" in body
    assert "http://" not in body  # nothing from elsewhere
    assert "https://" not in body


def test_a_head_request_has_the_headers_and_no_body(server: HttpServer) -> None:
    status, headers, body = get(server, "/livez", "HEAD")
    assert (status, headers["Content-Length"], body) == (200, "5", "")


@pytest.mark.parametrize("path", ["/nope", "/metrics/", "/../etc/passwd", "/%2e%2e/"])
def test_anything_else_is_404_and_names_what_there_is(server: HttpServer, path: str) -> None:
    status, _, body = get(server, path)
    assert (status, body) == (404, "not found; there are /metrics, /livez, /readyz, /\n")


def test_other_methods_are_refused(server: HttpServer) -> None:
    assert get(server, "/metrics", "DELETE")[0] == 405


def test_a_port_in_use_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use .* --http-port"):
            HttpServer("127.0.0.1", port, {})


def test_an_address_that_is_not_ours_is_said() -> None:
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
