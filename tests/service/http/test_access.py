"""Access to the HTTP pages: probes are open; the other pages need the configured tokens and certificates."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from tlsfiles import Authority, Pair
from waiting import until

from service.config import reloadedfiles
from service.config.certificates import CertificateFiles
from service.config.tokens import TokenFile
from service.http.connection import Limits
from service.http.pages import Access, Route, text
from service.http.server import HttpServer

READER, WRITER = "reader-0123456789abcdef", "writer-0123456789abcdef"
PAGES = {
    "/livez": Route(lambda _: text(HTTPStatus.OK, "live"), probe=True),
    "/metrics": Route(lambda _: text(HTTPStatus.OK, "metrics")),
    "/evidence": Route(lambda _: text(HTTPStatus.OK, "evidence"), scope="manage"),
}
Serve = Callable[..., HttpServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> HttpServer:
            server = HttpServer("127.0.0.1", 0, PAGES, **options)
            server.start()
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    path = tmp_path / "tokens"
    path.write_text(f"{READER} read\n{WRITER} infer,manage\n")
    path.chmod(0o600)
    return TokenFile(path)


def trusting(authority: Authority, client: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if client is not None:
        context.load_cert_chain(client.certificate, client.key)
    return context


def get(
    server: HttpServer, path: str, tls: ssl.SSLContext | None = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    where = ("127.0.0.1", server.port)
    connection = http.client.HTTPConnection(*where, timeout=30)
    if tls is not None:
        connection = http.client.HTTPSConnection(*where, timeout=30, context=tls)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


def test_with_a_token_file_everything_but_the_probes_needs_the_scope_read(serve: Serve, tokens: TokenFile) -> None:
    heard: list[str] = []
    server = serve(access=Access(tokens), on_refused=heard.append)
    assert get(server, "/livez")[0] == 200
    assert get(server, "/metrics", Authorization=f"Bearer {READER}")[0] == 200
    code, headers, _ = get(server, "/metrics")
    assert (code, headers["WWW-Authenticate"]) == (401, 'Bearer realm="bf16kit"')
    assert get(server, "/metrics", Authorization=f"Bearer {READER}x")[0] == 401
    code, headers, body = get(server, "/metrics", Authorization=f"Bearer {WRITER}")
    assert (code, body) == (403, "this token lacks the scope 'read'\n")
    assert get(server, "/no/such/page")[0] == 401  # without a token, a client must not learn which pages exist
    assert heard == ["unauthenticated", "unauthenticated", "forbidden", "unauthenticated"]


def test_no_token_appears_in_a_response_or_in_the_log(
    serve: Serve, tokens: TokenFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    server = serve(access=Access(tokens))
    for token in (READER, WRITER, "stranger-0123456789"):
        _, headers, body = get(server, f"/metrics?token={token}", Authorization=f"Bearer {token}")
        assert token not in f"{headers}{body}{caplog.text}"


def test_a_client_that_trusts_the_authority_is_served_over_tls(serve: Serve, authority: Authority, pair: Pair) -> None:
    server = serve(certificates=CertificateFiles(pair.certificate, pair.key))
    assert get(server, "/metrics", trusting(authority))[::2] == (200, "metrics\n")


def test_tls_before_1_2_and_plain_text_are_rejected(serve: Serve, authority: Authority, pair: Pair) -> None:
    server = serve(certificates=CertificateFiles(pair.certificate, pair.key))
    old = trusting(authority)
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSVersion.TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(OSError):  # noqa: PT011 -- how it fails is OpenSSL's affair
        get(server, "/livez", old)
    with pytest.raises((OSError, http.client.HTTPException)):
        get(server, "/livez")
    assert get(server, "/livez", trusting(authority))[0] == 200


def test_where_client_certificates_are_required_only_probes_work_without(
    serve: Serve, authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    certificates = CertificateFiles(pair.certificate, pair.key, authority.certificate)
    server = serve(certificates=certificates, access=Access(client_certificate=True))
    assert get(server, "/livez", trusting(authority))[0] == 200
    assert get(server, "/metrics", trusting(authority))[0] == 403
    assert get(server, "/metrics", trusting(authority, authority.sign("client")))[0] == 200
    stranger = Authority(tmp_path, "stranger").sign("client")
    with pytest.raises(OSError):  # noqa: PT011 -- how it fails is OpenSSL's affair
        get(server, "/livez", trusting(authority, stranger))


def test_a_renewed_certificate_is_used_for_new_connections(
    serve: Serve, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloadedfiles, "CHECK_SECONDS", 0.01)
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"

    def install(name: str) -> bytes:
        pair = authority.sign(name)
        key.write_bytes(pair.key.read_bytes())
        certificate.write_bytes(pair.certificate.read_bytes())
        return ssl.PEM_cert_to_DER_cert(pair.certificate.read_text())

    def shown() -> bytes | None:
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=30) as plain,
            trusting(authority).wrap_socket(plain, server_hostname="localhost") as peer,
        ):
            return peer.getpeercert(binary_form=True)

    first = install("first")
    server = serve(certificates=CertificateFiles(certificate, key))
    assert shown() == first
    second = install("second")
    until(lambda: shown() == second, what="the new certificate")


def test_a_tls_handshake_has_the_timeout_of_a_request(serve: Serve, authority: Authority, pair: Pair) -> None:
    server = serve(
        certificates=CertificateFiles(pair.certificate, pair.key),
        limits=Limits(connections=8, request_seconds=0.5),
    )
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(20)]
    assert get(server, "/livez", trusting(authority))[0] == 200  # although at most eight connections may be open
    for peer in silent:
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b""
        peer.close()


HERE = ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8002", "127.1.2.3:1", "[::1]", "[::1]:8002", "its.name:1"]
ELSEWHERE = [
    "evil.example", "evil.example:8002", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.7", "[::2]:1",
    "user@localhost", "localhost:", "localhost:99999999", "localhost/", "", "::1",
]  # fmt: skip


@pytest.mark.parametrize(("host", "answered"), [*((each, 200) for each in HERE), *((each, 403) for each in ELSEWHERE)])
def test_without_tokens_a_manage_page_is_served_only_for_hosts_of_this_machine(
    serve: Serve, host: str, answered: int
) -> None:
    """A browser sends the host name of the address it requests, and another site's name may resolve to this machine."""
    heard: list[str] = []
    server = serve(access=Access(host="its.name"), on_refused=heard.append)
    code, _, body = get(server, "/evidence", Host=host)
    assert code == answered
    if code == 403:
        assert body == "without tokens this page is served only for requests to localhost or 127.0.0.1\n"
        assert heard == ["forbidden"]
    assert get(server, "/metrics", Host=host)[0] == 200, "which holds nothing that a client sent"


def test_a_client_with_a_token_or_a_certificate_may_use_any_host_name(
    serve: Serve, tokens: TokenFile, authority: Authority, pair: Pair
) -> None:
    """A page of another site has neither."""
    server = serve(access=Access(tokens))
    assert get(server, "/evidence", Authorization=f"Bearer {WRITER}", Host="proxy.example")[0] == 200
    certificates = CertificateFiles(pair.certificate, pair.key, authority.certificate)
    server = serve(certificates=certificates, access=Access(client_certificate=True))
    client = trusting(authority, authority.sign("client"))
    assert get(server, "/evidence", client, Host="proxy.example")[0] == 200
    assert get(server, "/evidence", trusting(authority), Host="localhost")[0] == 403
