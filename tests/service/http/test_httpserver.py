"""The HTTP port over real sockets: its pages, who may see them, and what one connection may do."""

import contextlib
import http.client
import re
import socket
import ssl
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse, Response
from tlsfiles import Authority, Pair
from waiting import until

from bf16kit.messages.errors import ConfigError
from bf16kit.service.config import reloadedfiles
from bf16kit.service.config.certificates import CertificateFiles
from bf16kit.service.config.tokens import TokenFile
from bf16kit.service.http.httpserver import HttpServer, Limits
from bf16kit.service.http.pages import Access, Route

READER, WRITER = "reader-0123456789abcdef", "writer-0123456789abcdef"
QUICK = Limits(connections=8, request_seconds=0.5, idle_seconds=0.5, response_seconds=0.5)
LARGE = b"x" * (32 << 20)
GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


class Slow:
    """A page that counts its calls and waits for ``go``."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.made = 0

    def __call__(self, accept: str) -> Response:
        self.made += 1
        self.begun.release()
        assert self.go.wait(60)
        return PlainTextResponse(accept)


def broken(_: str) -> Response:
    raise RuntimeError("secret")


def pages(slow: Slow | None = None) -> dict[str, Route]:
    return {
        "/livez": Route(lambda _: PlainTextResponse("live\n"), probe=True),
        "/metrics": Route(lambda accept: PlainTextResponse(f"metrics {accept}")),
        "/large": Route(lambda _: Response(LARGE)),
        "/evidence": Route(lambda _: PlainTextResponse("evidence"), scope="manage"),
        "/broken": Route(broken),
        "/slow": Route(slow or Slow()),
        "/query": Route(PlainTextResponse, takes_query=True),
    }


class Serving:
    """A server with these options, and the reasons of its rejections."""

    def __init__(self, slow: Slow | None = None, **options: Any) -> None:
        self.heard: list[str] = []
        self.http = HttpServer("127.0.0.1", 0, pages(slow), on_refused=self.heard.append, **options)
        self.http.start()

    def get(
        self, path: str, tls: ssl.SSLContext | None = None, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], str]:
        where = ("127.0.0.1", self.http.port)
        connection = http.client.HTTPConnection(*where, timeout=30)
        if tls is not None:
            connection = http.client.HTTPSConnection(*where, timeout=30, context=tls)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.http.port), timeout=30)

    def ask(self, request: bytes) -> list[str]:
        """Return the statuses of the responses until the server closes the connection."""
        with self.connect() as peer:
            peer.sendall(request)
            return re.findall(r"HTTP/1.1 (\d+)", everything(peer))


def everything(peer: socket.socket) -> str:
    """Return what the server sends until it closes the connection."""
    received = []
    with contextlib.suppress(ConnectionResetError):
        while more := peer.recv(1 << 16):
            received.append(more)
    return b"".join(received).decode("latin-1")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def exchange(peer: socket.socket) -> None:
    """Get the response to a probe, on a connection that stays open."""
    peer.sendall(GET)
    received = b""
    while not received.endswith(b"live\n"):
        received += peer.recv(1 << 16)


Serve = Callable[..., Serving]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with contextlib.ExitStack() as stack:

        def start(*slow: Slow, **options: Any) -> Serving:
            serving = Serving(*slow, **options)
            stack.callback(serving.http.close)
            return serving

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


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_response_on_an_open_connection_waits_for_no_acknowledgement(serve: Serve) -> None:
    """It has two pieces. With Nagle's algorithm the second waits 40 ms, until the client acknowledges the first."""
    times = []
    with serve().connect() as peer:
        for _ in range(21):
            begun = time.monotonic()
            exchange(peer)
            times.append(time.monotonic() - begun)
    assert statistics.median(times) < 0.03


def test_a_head_request_has_the_headers_and_no_body(serve: Serve) -> None:
    status, headers, body = serve().get("/livez", method="HEAD")
    assert (status, headers["content-length"], body) == (200, "5", "")
    assert (headers["server"], headers["x-content-type-options"]) == ("bf16kit", "nosniff")
    assert "default-src 'none'" in headers["content-security-policy"]


def test_an_unknown_path_is_404_with_the_list_of_pages_and_another_method_is_405(serve: Serve) -> None:
    serving = serve()
    for path in ("/nope", "/metrics/", "/../etc/passwd", "/%2e%2e/"):
        status, _, body = serving.get(path)
        assert (status, "the pages are /livez, /metrics, " in body) == (404, True)
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "FROB"):
        status, headers, _ = serving.get("/livez", method=method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert serving.heard == ["http_malformed"] * 7


def test_a_page_gets_the_accept_header_arrives_complete_and_is_500_if_it_fails(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    serving = serve()
    assert serving.get("/metrics", Accept="a/b")[2] == "metrics a/b"
    assert serving.get("/large")[2].encode() == LARGE
    status, _, body = serving.get("/broken")
    assert (status, body) == (500, "internal error; the server's log has the details\n")
    assert "secret" in caplog.text


def test_clients_that_wait_for_a_page_share_it_too_many_get_503_and_probes_do_not_wait(serve: Serve) -> None:
    slow = Slow()
    serving = serve(slow)
    answers: list[tuple[int, str]] = []

    def ask(accept: str) -> None:
        status, _, body = serving.get("/slow", Accept=accept)
        answers.append((status, body))

    def start(accepts: list[str]) -> list[threading.Thread]:
        threads = [threading.Thread(target=ask, args=(accept,)) for accept in accepts]
        for thread in threads:
            thread.start()
        return threads

    threads = start(["first", "second"])  # one for each thread that makes pages
    for _ in threads:
        slow.begun.acquire()
    threads += start(["second"] * 20)
    threads += start([str(at) for at in range(40)])  # at most 32 different pages wait
    until(lambda: len(answers) == 9, what="the rejections")
    assert {status for status, _ in answers} == {503}
    assert serving.get("/livez")[0] == 200
    slow.go.set()
    for thread in threads:
        thread.join()
    assert slow.made == 2 + 32, "who came after a page was begun got a newer one, and all who waited got the same"
    assert sum(status == 200 for status, _ in answers) == 2 + 20 + 31
    assert serving.heard == ["http_busy"] * 9


@pytest.mark.parametrize(("host", "words"), [("127.0.0.1", "is in use"), ("192.0.2.1", "cannot listen on 192")])
def test_an_address_that_cannot_be_bound_is_reported_before_any_model_is_loaded(host: str, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=words):
        HttpServer(host, taken.getsockname()[1], {})


# --- one connection ---------------------------------------------------------------------------------------------------


def test_requests_in_one_packet_are_answered_in_order(serve: Serve) -> None:
    assert serve(limits=QUICK).ask(GET * 50 + GET.replace(b"livez", b"no")) == ["200"] * 50 + ["404"]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS hello\r\n\r\n", "400"),
        (b"GET /livez\r\n\r\n", "400"),
        (b"GET /livez HTTP/1.1\r\n\r\n", "400"),  # no Host
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "400"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n", "400"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Large: " + b"a" * (256 << 10), "400"),  # before it is complete
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Large: " + b"a" * (32 << 10) + b"\r\n\r\n", "400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "405"),
        (b"GET /livez HTTP/1.0\r\n\r\n", "200"),
        (b"GET /livez?q HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "200"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\nabc", "200"),  # its body is not waited for
    ],
)
def test_each_kind_of_unusual_request_has_its_status(serve: Serve, request_: bytes, expected: str) -> None:
    serving = serve(limits=QUICK)
    assert serving.ask(request_)[0] == expected
    assert serving.heard[:1] == ([] if expected == "200" else ["http_malformed"])


@pytest.mark.long
def test_no_request_writes_to_the_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Nor does one with an invalid body, before or after its response, or a header that is no address."""
    caplog.set_level("DEBUG", "uvicorn")
    serving = serve(limits=QUICK)
    chunked = b"GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert serving.ask(chunked + b"no chunk\r\n") == []
    with serving.connect() as peer:
        peer.sendall(chunked)
        assert peer.recv(1) == b"H"
        peer.sendall(b"no chunk\r\n")
        assert "200" in everything(peer)
    assert serving.heard == ["http_malformed"] * 2
    for odd in (
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: [\r\nConnection: close\r\n\r\n", b"GET /%ff HTTP/1.1\r\nHost: [\r\n\r\n",
        b"GET /query?[ HTTP/1.1\r\nHost: [\r\nAuthorization: \xff\r\nAccept: \xff\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    ):  # fmt: skip
        assert len(serving.ask(odd)) == 1, odd
    assert caplog.text == ""


@pytest.mark.long
def test_a_silent_an_incomplete_and_an_idle_connection_are_closed(serve: Serve) -> None:
    serving = serve(limits=QUICK)
    assert serving.ask(b"") == []
    assert serving.ask(GET) == ["200"]
    assert serving.heard == []
    assert serving.ask(GET[:-2]) == []
    assert serving.heard == ["http_timeout"]


def test_a_response_may_take_longer_than_a_request(serve: Serve) -> None:
    slow = Slow()
    serving = serve(slow, limits=Limits(request_seconds=0.5))
    with serving.connect() as asking, serving.connect() as silent:
        asking.sendall(GET.replace(b"livez HTTP/1.1", b"slow HTTP/1.0"))
        assert everything(silent) == "", "it was connected last, and its time to send a request is over"
        slow.go.set()
        assert "200" in everything(asking)


def test_single_bytes_do_not_extend_the_request_timeout(serve: Serve) -> None:
    serving = serve(limits=QUICK)
    with serving.connect() as peer:
        peer.sendall(b"GET /livez HTTP/1.1\r\nX: ")
        peer.settimeout(0.01)

        def closed() -> bool:
            try:
                peer.sendall(b"a")
                return not peer.recv(1)
            except TimeoutError:
                return False
            except OSError:
                return True

        until(closed)
    assert serving.heard == ["http_timeout"]


def test_a_client_that_does_not_read_is_disconnected_and_others_are_served(serve: Serve) -> None:
    serving = serve(limits=QUICK)
    opened = open_files()
    with serving.connect() as lazy:
        lazy.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        lazy.recv(1)
        assert serving.get("/livez")[0] == 200
        until(lambda: open_files() == opened + 1)  # its own end
        assert len(everything(lazy)) < len(LARGE)


def test_at_the_connection_limit_the_connection_that_waited_longest_is_closed(serve: Serve) -> None:
    serving = serve(limits=Limits(connections=8, request_seconds=60, idle_seconds=60))
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(serving.connect()) for _ in range(8)]
        exchange(idle[1])  # since this response it has waited for less time than the rest
        idle[2].sendall(GET[:9])  # a part of a request is no progress
        for _ in range(3):
            exchange(stack.enter_context(serving.connect()))
        assert [everything(idle[at]) for at in (0, 2, 3)] == ["", "", ""]
        assert serving.heard == ["http_connections"] * 3
        exchange(idle[1])
        exchange(idle[4])


def test_closing_the_server_ends_connections_in_every_state(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    slow, before = Slow(), set(threading.enumerate())
    serving = serve(slow, limits=Limits(request_seconds=60, idle_seconds=60, response_seconds=60))
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(serving.connect()) for _ in range(5)]
        peers[1].sendall(GET[:9])
        exchange(peers[2])
        peers[3].sendall(GET.replace(b"livez", b"large"))
        assert peers[3].recv(1) == b"H"
        peers[4].sendall(GET.replace(b"livez", b"slow"))
        slow.begun.acquire()
        serving.http.close()
        assert "http" not in {thread.name for thread in threading.enumerate() if thread not in before}
        slow.go.set()
        assert everything(peers[4]) == ""
    assert caplog.text == ""


# --- access -----------------------------------------------------------------------------------------------------------


def test_with_a_token_file_everything_but_the_probes_needs_the_scope_read(
    serve: Serve, tokens: TokenFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    serving = serve(access=Access(tokens))
    assert serving.get("/livez")[0] == 200
    assert serving.get("/metrics", Authorization=f"Bearer {READER}")[0] == 200
    assert serving.get("/evidence", Authorization=f"Bearer {WRITER}", Host="proxy.example")[0] == 200, "by any name"
    code, headers, _ = serving.get("/metrics")
    assert (code, headers["www-authenticate"]) == (401, 'Bearer realm="bf16kit"')
    assert serving.get("/metrics", Authorization=f"Bearer {READER}x")[0] == 401
    code, _, body = serving.get("/metrics", Authorization=f"Bearer {WRITER}")
    assert (code, body) == (403, "this token lacks the scope 'read'\n")
    assert serving.get("/no/such/page")[0] == 401  # without a token, a client must not learn which pages exist
    assert serving.heard == ["unauthenticated", "unauthenticated", "forbidden", "unauthenticated"]
    for token in (READER, WRITER, "stranger-0123456789"):
        _, headers, body = serving.get(f"/metrics?token={token}", Authorization=f"Bearer {token}")
        assert token not in f"{headers}{body}{caplog.text}"


def test_tls_before_1_2_and_plain_text_are_rejected(serve: Serve, authority: Authority, pair: Pair) -> None:
    serving = serve(certificates=CertificateFiles(pair.certificate, pair.key))
    old = trusting(authority)
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSVersion.TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(OSError):  # noqa: PT011 -- how it fails is OpenSSL's affair
        serving.get("/livez", old)
    with pytest.raises((OSError, http.client.HTTPException)):
        serving.get("/livez")
    assert serving.get("/metrics", trusting(authority))[0] == 200


def test_where_client_certificates_are_required_only_probes_work_without(
    serve: Serve, authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    certificates = CertificateFiles(pair.certificate, pair.key, authority.certificate)
    serving = serve(certificates=certificates, access=Access(client_certificate=True))
    assert serving.get("/livez", trusting(authority))[0] == 200
    assert serving.get("/metrics", trusting(authority))[0] == 403
    client = trusting(authority, authority.sign("client"))
    assert serving.get("/metrics", client)[0] == 200
    assert serving.get("/evidence", client, Host="proxy.example")[0] == 200, "a page of another site has no certificate"
    stranger = Authority(tmp_path, "stranger").sign("client")
    with pytest.raises(OSError):  # noqa: PT011 -- how it fails is OpenSSL's affair
        serving.get("/livez", trusting(authority, stranger))


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
        with serving.connect() as plain, trusting(authority).wrap_socket(plain, server_hostname="localhost") as peer:
            return peer.getpeercert(binary_form=True)

    first = install("first")
    serving = serve(certificates=CertificateFiles(certificate, key))
    assert shown() == first
    second = install("second")
    until(lambda: shown() == second, what="the new certificate")


def test_a_tls_handshake_has_the_timeout_of_a_request_and_counts_as_a_connection(
    serve: Serve, authority: Authority, pair: Pair
) -> None:
    serving = serve(certificates=CertificateFiles(pair.certificate, pair.key), limits=QUICK)
    silent = [serving.connect() for _ in range(20)]
    assert serving.get("/livez", trusting(authority))[0] == 200  # although at most eight connections may be open
    for peer in silent:
        assert everything(peer) == ""
        peer.close()


HERE = ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8002", "127.1.2.3:1", "[::1]", "[::1]:8002", "its.name:1"]
ELSEWHERE = [
    "evil.example", "evil.example:8002", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.7", "[::2]:1",
    "user@localhost", "localhost:", "localhost:99999999", "localhost/", "", "::1",
]  # fmt: skip


def test_without_tokens_a_manage_page_is_served_only_for_hosts_of_this_machine(serve: Serve) -> None:
    """A browser sends the host name of the address it requests, and another site's name may resolve to this machine."""
    serving = serve(access=Access(host="its.name"))
    assert {host: serving.get("/evidence", Host=host)[0] for host in HERE} == dict.fromkeys(HERE, 200)
    assert {host: serving.get("/evidence", Host=host)[0] for host in ELSEWHERE} == dict.fromkeys(ELSEWHERE, 403)
    assert serving.heard == ["forbidden"] * len(ELSEWHERE)
    assert serving.get("/metrics", Host="evil.example")[0] == 200, "which holds nothing that a client sent"
