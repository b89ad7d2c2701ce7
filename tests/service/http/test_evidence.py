"""``/evidence``: which clients get it, and the errors that others get."""

from __future__ import annotations

import http.client
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loopback import LoopbackModel, LoopbackRegistry

from bf16kit.messages.errors import NotFound, Unavailable
from service.config.tokens import TokenFile
from service.http.evidence import Fetch, evidence_route
from service.http.pages import Access, routes
from service.http.server import HttpServer
from service.http.views import StatusReader
from service.telemetry.history import History
from service.telemetry.metrics import Metrics

MANAGE, READ = "manager-0123456789abcdef", "reader-0123456789abcdef"
Open = Callable[[Fetch | None], HttpServer]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Open]:
    """Yield a function that starts a server of model ``m``, versions 1 and 3, with two tokens."""
    servers: list[HttpServer] = []
    (tmp_path / "tokens").write_text(f"{MANAGE} manage\n{READ} read,infer\n")
    (tmp_path / "tokens").chmod(0o600)

    def start(fetch: Fetch | None) -> HttpServer:
        registry, metrics = LoopbackRegistry([LoopbackModel("m"), LoopbackModel("m", version=3)]), Metrics()
        pages = routes(
            registry, metrics, StatusReader(registry, History(lambda: ())).snapshot, evidence_route(registry, fetch)
        )
        server = HttpServer("127.0.0.1", 0, pages, access=Access(TokenFile(tmp_path / "tokens")))
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.close()


def get(server: HttpServer, path: str, token: str = MANAGE) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_a_client_with_the_scope_manage_gets_evidence_and_the_log_records_it(
    serve: Open, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[str, int]] = []

    def fetch(model: str, version: int) -> bytes:
        asked.append((model, version))
        return b"the payload"

    server = serve(fetch)
    assert get(server, "/evidence?model=m&version=1") == (200, b"the payload")
    assert get(server, "/evidence?model=m") == (200, b"the payload")
    assert asked == [("m", 1), ("m", 3)], "without a version the newest"
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said[0].startswith("model 'm' version 1: sending the evidence of its last breach, 11 bytes")
    assert "payload" not in caplog.text


@pytest.mark.parametrize(
    ("token", "status", "words"),
    [("", 401, "needs a token"), ("unknown-0123456789abcdef", 401, "needs a token"), (READ, 403, "scope 'manage'")],
)
def test_other_clients_get_no_evidence_and_do_not_learn_whether_there_is_any(
    serve: Open, token: str, status: int, words: str
) -> None:
    for fetch in (lambda model, version: b"the payload", None):
        found, body = get(serve(fetch), "/evidence?model=m", token)
        assert (found, b"payload" in body) == (status, False)
        assert words in body.decode()


def test_a_token_with_the_scope_manage_alone_gets_no_other_page(serve: Open) -> None:
    server = serve(None)
    assert get(server, "/metrics", MANAGE)[0] == 403
    assert get(server, "/metrics", READ)[0] == 200


def test_a_server_without_evidence_responds_that_it_is_off(serve: Open) -> None:
    status, body = get(serve(None), "/evidence?model=m")
    assert (status, body.decode()) == (
        404,
        "evidence is off: start the server with --evidence to keep that of the next breach\n",
    )


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("", 400, "request /evidence?model=NAME"),
        ("?", 400, "request /evidence?model=NAME"),
        ("?version=1", 400, "request /evidence?model=NAME"),
        ("?model=m&model=n", 400, "request /evidence?model=NAME"),
        ("?model=m&rows=1", 400, "'rows' is not a parameter of this page"),
        ("?model=m&version=one", 400, "version"),
        ("?model=nobody", 404, "model 'nobody' is not known"),
        ("?model=m&version=2", 404, "is not known"),
        ("?" + "&".join(f"a{i}=1" for i in range(20)), 400, "request /evidence?model=NAME"),
    ],
)
def test_an_invalid_query_gets_a_one_line_error(serve: Open, query: str, status: int, words: str) -> None:
    found, body = get(serve(lambda model, version: b"the payload"), f"/evidence{query}")
    assert found == status, body
    assert words in body.decode()
    assert body.count(b"\n") == 1


@pytest.mark.parametrize(
    ("error", "status"), [(NotFound("no breach yet"), 404), (Unavailable("the shadow has ended"), 503)]
)
def test_an_error_in_fetching_evidence_is_the_response(serve: Open, error: Exception, status: int) -> None:
    def fetch(model: str, version: int) -> bytes:
        raise error

    assert get(serve(fetch), "/evidence?model=m") == (status, f"{error}\n".encode())
