"""``bf16-serve evidence``: it writes one file, or one line with the reason why not."""

import socket
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from commanded import Run, one_line
from loopback import LoopbackModel, LoopbackRegistry
from tlsfiles import Authority

from bf16kit.artifact.evidence import Evidence, Header
from bf16kit.messages.errors import NotFound
from bf16kit.service.config.certificates import CertificateFiles
from bf16kit.service.config.tokens import TokenFile
from bf16kit.service.http.httpserver import HttpServer
from bf16kit.service.http.pages import Access, Fetch, evidence_route

MANAGE, READ = "manager-0123456789abcdef", "reader-0123456789abcdef"
HEADER = Header(
    model="m", version=1, at="2026-01-01T00:00:00+00:00", profile="cpu", precision="bf16-weights", rows=1, of_rows=4,
    batch_axis=0, budget={"relative_l2": 0.015}, drift={"y": {"relative_l2": 0.5}},
    verdict={"state": "over", "cause": "broken"}, files={}, versions={},
)  # fmt: skip
KEPT = Evidence(
    HEADER,
    {"x": np.full((1, 2), 4321.0, np.float32)},
    {"y": np.ones((1, 2), np.float32)},
    {"y": np.zeros((1, 2), np.float32)},
).dumps()
Open = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Open]:
    """Yield a function that starts a server's HTTP port with one model, ``m``, and returns its URL."""
    servers: list[HttpServer] = []

    def start(fetch: Fetch | None, access: Access | None = None, files: CertificateFiles | None = None) -> str:
        route = evidence_route(LoopbackRegistry([LoopbackModel("m")]), fetch)
        servers.append(HttpServer("127.0.0.1", 0, {"/evidence": route}, access=access, certificates=files))
        servers[-1].start()
        return f"{'http' if files is None else 'https'}://127.0.0.1:{servers[-1].port}"

    yield start
    for server in servers:
        server.close()


def kept(model: str, version: int) -> bytes:
    return KEPT


def nothing(model: str, version: int) -> bytes:
    raise NotFound(f"model {model!r} version {version} has not been over its budget since it was loaded")


def check(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.stderr
    said = one_line(result)
    assert said.startswith("bf16-serve evidence: ")
    for each in words:
        assert each in said


def test_only_the_owner_may_read_the_file_and_another_is_replaced_only_with_force(
    serve: Open, run: Run, tmp_path: Path
) -> None:
    out, server = tmp_path / "breach", serve(kept)
    (tmp_path / "target").write_text("mine")
    out.symlink_to(tmp_path / "target")
    check(run("evidence", "m", "--server", server, "--out", out), 2, "already exists")
    result = run("evidence", "m", "--server", server, "--out", out, "--force")
    assert result.exit_code == 0, result.stderr
    assert out.read_bytes() == KEPT
    assert stat.S_IMODE(out.lstat().st_mode) == 0o600
    assert (tmp_path / "target").read_text() == "mine"
    assert "1 of 4 rows of a request that model 'm' version 1 answered" in result.stdout
    assert "over, cause broken" in result.stdout
    assert "4321" not in result.stdout  # no payload
    for wrong in (tmp_path / "none" / "e", tmp_path, tmp_path / ("n" * 300)):
        check(run("evidence", "m", "--server", server, "--out", wrong, "--force"), 2, "cannot be written")


def test_an_error_of_the_server_is_reported_in_one_line_and_nothing_is_written(
    serve: Open, run: Run, tmp_path: Path
) -> None:
    for fetch, model, code, words in (
        (nothing, "m", 1, "model 'm' version 1 has not been over its budget"),
        (None, "m", 1, "evidence is off: start the server with --evidence"),
        (kept, "nobody", 1, "unknown model 'nobody'"),
        (lambda model, version: b"something else", "m", 2, "is not evidence"),
    ):
        server = serve(fetch)
        where = server.removeprefix("http://")
        check(run("evidence", model, "--server", server, "--out", tmp_path / "e"), code, where, words)
    assert list(tmp_path.iterdir()) == []


def test_tokens_come_from_a_file_like_the_servers_or_the_environment(
    serve: Open, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, reader = tmp_path / "both", tmp_path / "reader"
    both.write_text(f"# of the server\n{READ} read,infer  # a dashboard\n\n{MANAGE} read,manage\n")
    reader.write_text(f"{READ} read\n")
    for file in (both, reader):
        file.chmod(0o600)
    asked = ("evidence", "m", "--server", serve(kept, Access(TokenFile(both))), "--force", "--out", tmp_path / "breach")
    check(run(*asked), 1, "a token is needed")
    check(run(*asked, "--token-file", reader), 2, "no token with the scope manage")
    check(run(*asked, "--token-file", tmp_path / "no"), 2, "cannot be read")
    monkeypatch.setenv("BF16KIT_TOKEN", READ)
    check(run(*asked), 1, "lacks the scope 'manage'")
    assert run(*asked, "--token-file", both).exit_code == 0
    monkeypatch.setenv("BF16KIT_TOKEN", f"{MANAGE}\n")
    assert run(*asked).exit_code == 0


@pytest.mark.parametrize("token", ["geheimes-wört-0123456789", "two words-0123456789", "a\r\nX-Header: b", "\udcff"])
def test_an_invalid_token_is_neither_sent_nor_shown(
    token: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BF16KIT_TOKEN", token)
    result = run("evidence", "m", "--server", "http://127.0.0.1:1", "--out", tmp_path / "breach")
    check(result, 2, "BF16KIT_TOKEN is not a bearer token")
    assert token not in result.stderr
    assert "wört" not in result.stderr


def test_tls_is_used_and_the_certificate_is_verified(serve: Open, run: Run, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.sign("server"), Authority(tmp_path, "other")
    server, out = serve(kept, None, CertificateFiles(pair.certificate, pair.key, None)), tmp_path / "breach"
    arguments = ("evidence", "m", "--server", server, "--out", out)
    check(run(*arguments), 2, "no TLS connection: certificate verify failed; give --ca")
    plain = server.replace("https", "http")
    check(run("evidence", "m", "--server", plain, "--out", out), 2, f"if it speaks TLS, give {server}")
    check(run(*arguments, "--ca", other.certificate), 2, "no TLS connection")
    check(run(*arguments, "--ca", tmp_path / "none"), 2, "the certificates cannot be used")
    assert run(*arguments, "--ca", authority.certificate).exit_code == 0


def test_wrong_usage_is_one_line(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "breach"
    check(run("evidence", "m", "--ca", out, "--out", out), 2, "--ca, --certificate and --key need --server https://")
    for server in ("host:8002", "ftp://host:1", "http://host:1/evidence", "http://host:99999", "https://[x]:1"):
        check(run("evidence", "m", "--server", server, "--out", out), 2, "expected http://HOST:PORT, or https://")
    check(run("evidence", "m", "--key", out, "--out", out), 2, "give --certificate and --key together")
    check(run("evidence", "m\udcff", "--out", out), 2, "MODEL 'm\\udcff': is not valid UTF-8")
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor() as pool:  # it speaks, but no HTTP

        def answer() -> None:
            with silent.accept()[0] as peer:
                peer.sendall(b"\x00\x00\x18\x04\x00 not HTTP\n")

        pool.submit(answer)
        server = f"http://127.0.0.1:{silent.getsockname()[1]}"
        check(run("evidence", "m", "--server", server, "--out", out), 2, "no server's HTTP port answers there")
