"""``bf16-serve evidence``: saves the evidence for the newest drift breach of a running server's model in a file."""

from __future__ import annotations

import os
import ssl
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote, urlsplit

import click

from bf16kit.messages.errors import Bf16kitError, UsageError
from bf16kit.messages.wording import brief, quoted, size
from service.commands import output

_FILE = click.Path(path_type=Path)
_TOKEN = "BF16KIT_TOKEN"  # noqa: S105 -- the name of a variable
_SECONDS = 30.0


@click.command()
@click.argument("model")
@click.option("--version", type=click.IntRange(min=1), metavar="N", help="Version of MODEL.  [default: the newest]")
@click.option(
    "--server",
    default="http://127.0.0.1:8002",
    show_default=True,
    metavar="URL",
    help="The server's HTTP port: http://HOST:PORT, or https://HOST:PORT if it uses TLS.",
)
@click.option("--out", required=True, type=_FILE, metavar="FILE", help="File to write; only its owner can read it.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option(
    "--token-file",
    type=_FILE,
    metavar="FILE",
    help="The server's token file; its first token with the scope manage is sent.  [default: BF16KIT_TOKEN, or none]",
)
@click.option("--ca", type=_FILE, metavar="FILE", help="PEM certificate of the authority that signed the server's.")
@click.option("--certificate", type=_FILE, metavar="FILE", help="PEM client certificate; needs --key.")
@click.option("--key", type=_FILE, metavar="FILE", help="PEM key of --certificate.")
def evidence(
    model: str,
    version: int | None,
    server: str,
    out: Path,
    force: bool,
    token_file: Path | None,
    ca: Path | None,
    certificate: Path | None,
    key: Path | None,
) -> None:
    """Fetch the evidence for MODEL's newest drift breach: one live row, its response and the reference's response.

    The server must have been started with --evidence. The file holds a client's data; `bf16-convert explain FILE
    --artifact DIRECTORY` names the layer that diverged on it. Exit codes: 0; 1 no evidence, or access denied;
    2 wrong usage.
    """
    from bf16kit.artifact.evidence import Evidence

    with output.exit_on_errors("evidence"):
        if os.path.lexists(out) and not force:
            raise UsageError(f"{out}: already exists; give another --out, or --force")
        if (certificate is None) != (key is None):
            raise UsageError("give --certificate and --key together")
        data = _fetch(server, model, version, _token(token_file), (ca, certificate, key))
        header = Evidence.loads(data, server).header
        _write(out, data, force)
    output.echo(
        f"{out}: {size(len(data))}, {header.rows} of {header.of_rows} rows of a request that model {header.model!r}"
        f" version {header.version} answered {header.at} with profile {header.profile}; {header.verdict.get('state')},"
        f" cause {header.verdict.get('cause')}. It holds what a client sent. Next:"
        f" bf16-convert explain {out} --artifact REPOSITORY/{header.model}/{header.version}"
    )


def _fetch(server: str, model: str, version: int | None, token: str, files: tuple[Path | None, ...]) -> bytes:
    """Fetch the evidence; ``files`` are those of --ca, --certificate and --key.

    Raises Bf16kitError with the server's message, UsageError for options that cannot be used and if no server answers.
    """
    import http.client

    from bf16kit.artifact.evidence import MOST_BYTES

    try:
        parts = urlsplit(server)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if not host or port is None or parts.scheme not in ("http", "https") or parts.path not in ("", "/"):
        raise UsageError(
            f"--server {server!r}: expected http://HOST:PORT, or https://HOST:PORT for a server that speaks TLS"
        )
    try:
        path = f"/evidence?model={quote(model, safe='')}{'' if version is None else f'&version={version}'}"
    except UnicodeEncodeError:
        raise UsageError(f"MODEL {quoted(model)}: is not valid UTF-8, so it cannot be a model's name") from None
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    if parts.scheme == "http" and any(files):
        raise UsageError(f"--ca, --certificate and --key need --server https://HOST:PORT, not {server!r}")
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(host, port, timeout=_SECONDS, context=_context(*files))
    where = f"{host}:{port}"
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        response = connection.getresponse()
        data = response.read(MOST_BYTES + 1)
    except ssl.SSLError as error:
        raise UsageError(f"{where}: no TLS connection: {brief(error)}; give --ca, or http://{where}") from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        reason = brief(error) or type(error).__name__
        raise UsageError(f"{where}: no server's HTTP port answers there: {reason}") from None
    finally:
        connection.close()
    if response.status != HTTPStatus.OK:
        text = brief(data[:4096].decode("utf-8", "replace"))
        raise Bf16kitError(f"{where}: {text or f'answered {response.status} {response.reason}'}")
    return data


def _context(ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"the certificates cannot be used: {brief(error)}") from None
    return context


def _token(file: Path | None) -> str:
    from service.config.tokens import is_token, read_tokens

    if file is None:
        token = os.environ.get(_TOKEN, "").strip()  # a value read from a file may end with a newline
        if token and not is_token(token):
            raise UsageError(f"{_TOKEN} is not a bearer token: use letters, digits and . _ ~ + / - only, then = signs")
        return token
    for token, scopes in read_tokens(file):
        if "manage" in scopes:
            return token
    raise UsageError(f"--token-file {file}: has no token with the scope manage")


def _write(out: Path, data: bytes, force: bool) -> None:
    """Write ``data`` to a new file that only its owner can read. Raises UsageError if it cannot be written."""
    try:
        if force:
            out.unlink(missing_ok=True)
        file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(file, "wb") as written:
                written.write(data)
        except OSError:
            out.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror}") from None
