"""The client side of ``/evidence``: one GET request over HTTP or TLS, saved in one file."""

from __future__ import annotations

import http.client
import ipaddress
import os
import ssl
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Self
from urllib.parse import quote, urlsplit

from bf16kit.artifact.evidence import MOST_BYTES, Evidence
from bf16kit.messages.errors import Bf16kitError, ConfigError, UsageError
from bf16kit.messages.wording import brief, quoted, size
from service.config.tokens import is_token, read_tokens
from service.http.pages import EVIDENCE

TOKEN = "BF16KIT_TOKEN"  # noqa: S105 -- the name of a variable
_SECONDS = 30.0


class Refused(Bf16kitError):
    """The server rejected the request: there is no evidence, it is off, or the token lacks the scope."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server's HTTP port, and the credentials to use there."""

    host: str
    port: int
    token: str = ""
    context: ssl.SSLContext | None = None

    @classmethod
    def of(
        cls, server: str, token_file: Path | None, ca: Path | None, certificate: Path | None, key: Path | None
    ) -> Self:
        """Return the endpoint for the command's options. Raises UsageError for options that cannot be used."""
        scheme, host, port = _split_address(server)
        if (certificate is None) != (key is None):
            raise UsageError("give --certificate and --key together")
        secure = scheme == "https" or ca is not None or certificate is not None
        context = _context(ca, certificate, key) if secure else None
        token = _token(token_file)
        if token and not (secure or scheme or _loopback(host)):
            raise UsageError(
                f"--server {server!r}: would send the token and get the evidence unencrypted; give https://, or"
                " http:// to allow that"
            )
        return cls(host, port, token, context)

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection that is not open yet."""
        if self.context is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=_SECONDS)
        return http.client.HTTPSConnection(self.host, self.port, timeout=_SECONDS, context=self.context)


@dataclass(frozen=True, slots=True)
class FetchedEvidence:
    """Evidence as bytes, and parsed."""

    data: bytes
    evidence: Evidence

    def summary(self, out: Path) -> str:
        """Return one paragraph that describes the file, without any of the payload."""
        header = self.evidence.header
        verdict = header.verdict
        return (
            f"{out}: {size(len(self.data))}, {header.rows} of {header.of_rows} rows of a request that model"
            f" {header.model!r} version {header.version} answered {header.at} with profile {header.profile};"
            f" {verdict.get('state')}, cause {verdict.get('cause')}. It holds what a client sent. Next:"
            f" bf16-convert explain {out} --artifact REPOSITORY/{header.model}/{header.version}"
        )


def fetch(endpoint: Endpoint, model: str, version: int | None) -> FetchedEvidence:
    """Fetch the evidence for the newest breach of ``model``.

    Raises Refused with the server's message, or UsageError if no HTTP server answers or the response is no evidence.
    """
    try:
        query = f"?model={quote(model, safe='')}"
    except UnicodeEncodeError:
        raise UsageError(f"MODEL {quoted(model)}: is not valid UTF-8, so it cannot be a model's name") from None
    query += "" if version is None else f"&version={version}"
    headers = {"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}
    where = f"{endpoint.host}:{endpoint.port}"
    connection = endpoint.connect()
    try:
        connection.request("GET", EVIDENCE + query, headers=headers)
        response = connection.getresponse()
        data = response.read(MOST_BYTES + 1)
    except ssl.SSLError as error:
        raise UsageError(f"{where}: no TLS connection: {brief(error)}; give --ca, or http://{where}") from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise UsageError(
            f"{where}: no server's HTTP port answers there: {brief(error) or type(error).__name__}"
        ) from None
    finally:
        connection.close()
    if response.status == HTTPStatus.OK:
        return FetchedEvidence(data, Evidence.loads(data, where))
    text = brief(data[:4096].decode("utf-8", "replace"))
    raise Refused(f"{where}: {text or f'answered {response.status} {response.reason}'}")


def check_free(out: Path, *, force: bool) -> None:
    """Raise UsageError if ``out`` is a directory, or an existing file that may not be replaced."""
    try:
        if not out.name or out.is_dir():
            raise UsageError(f"--out {out}: is a directory; name a file")
        if out.exists() and not force:
            raise UsageError(f"{out}: already exists; give another --out, or --force")
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror}") from None


def write(out: Path, data: bytes, *, force: bool) -> None:
    """Write ``data`` to a file that only its owner can read. Raises UsageError if it exists or cannot be written."""
    check_free(out, force=force)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(file, "wb") as written:
                written.write(data)
            partial.replace(out)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror}") from None


def _split_address(server: str) -> tuple[str, str, int]:
    """Split ``--server`` into scheme ("" for none), host and port. Raises UsageError for anything else."""
    try:
        parts = urlsplit(server if "://" in server else f"//{server}")
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = None, None, None
    if (
        parts is None
        or parts.scheme not in ("", "http", "https")
        or not host
        or port is None
        or parts.path not in ("", "/")
    ):
        raise UsageError(f"--server {server!r}: expected HOST:PORT, or https://HOST:PORT for a server that speaks TLS")
    return parts.scheme, host, port


def _loopback(host: str) -> bool:
    """Return whether what is sent to ``host`` stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _token(file: Path | None) -> str:
    if file is None:
        token = os.environ.get(TOKEN, "").strip()  # a value read from a file may end with a newline
        if token and not is_token(token):
            raise UsageError(f"{TOKEN} is not a bearer token: use letters, digits and . _ ~ + / - only, then = signs")
        return token
    for token, scopes in read_tokens(file):
        if "manage" in scopes:
            return token
    raise UsageError(f"--token-file {file}: has no token with the scope manage")


def _context(ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificates cannot be used: {brief(error)}") from None
    return context
