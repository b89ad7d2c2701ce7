"""The commands that ask a running server: ``bf16-serve health`` and ``bf16-serve evidence``."""

from __future__ import annotations

import os
import socket
import ssl
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import click

from bf16kit.messages.errors import Bf16kitError, ConfigError, UsageError
from bf16kit.messages.wording import brief, quoted, size
from bf16kit.service.commands import output
from bf16kit.system import controlgroup

if TYPE_CHECKING:
    import grpc

    from bf16kit.service.config.serverconfig import ServerConfig

_FILE = click.Path(path_type=Path)
_CHECK = "/grpc.health.v1.Health/Check"
_WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 -- listened on, not by us
_TOKEN = "BF16KIT_TOKEN"  # noqa: S105 -- the name of a variable
_EVIDENCE_SECONDS = 30.0
_UNREACHABLE = "no server can be reached there"


@click.command()
@click.argument("model", default="")
@click.option("--timeout", "seconds", type=click.FloatRange(0.05, 3600), default=2.0, show_default=True, metavar="S")
@click.option("--host", help="The server's host.  [default: 127.0.0.1]")
@click.option("--grpc-port", type=int, help="The server's gRPC port.  [default: 8001]")
@click.option("--tls-certificate", type=_FILE, metavar="FILE", help="The server's certificate, which is trusted.")
@click.option("--tls-key", type=_FILE, metavar="FILE", help="The server's key.")
@click.option("--tls-client-ca", type=_FILE, metavar="FILE", help="The server's authority for client certificates.")
@click.option(
    "--certificate",
    type=_FILE,
    envvar="BF16KIT_HEALTH_CERTIFICATE",
    metavar="FILE",
    help="PEM client certificate, if the server asks for one; needs --key.  [default: the server's own]",
)
@click.option("--key", type=_FILE, envvar="BF16KIT_HEALTH_KEY", metavar="FILE", help="PEM key of --certificate.")
@output.config_file
def health(
    model: str, seconds: float, certificate: Path | None, key: Path | None, file: Path | None, **flags: object
) -> None:
    """Ask this machine's server over grpc.health.v1 whether it is ready; with MODEL, whether that model is ready.

    Give the settings that the server was started with: the environment (BF16KIT_GRPC_PORT and so on), server.yaml,
    or the same flags. Exit codes: 0 ready; 1 not ready, or no answer: one line says why.
    """
    controlgroup.maximize_oom_score()  # if memory runs out, the kernel must kill this process, not the server
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the one line of output has gRPC's reason
    from bf16kit.service.config.serverconfig import load_config

    try:
        if (certificate is None) != (key is None):
            raise ConfigError("give --certificate and --key together")
        config = load_config({"repository": "/", **flags}, file)  # the repository does not matter here
        if config.grpc_port == 0:
            raise ConfigError("grpc_port 0: give the port that the server listens on, 1 to 65535")
        host = _WILDCARD_HOSTS.get(config.host, config.host)
        target = f"[{host}]:{config.grpc_port}" if ":" in host else f"{host}:{config.grpc_port}"
        with _channel(target, config, certificate, key) as channel:
            reason = _reason_not_ready(channel, model, seconds)
        if _UNREACHABLE in reason:
            reason += _other_protocol(host, config.grpc_port, config.tls_certificate is not None, seconds)
    except Bf16kitError as error:
        output.fail("health", str(error), output.FAILED)
    if reason:
        output.fail("health", f"{target}: {reason}", output.FAILED)
    output.echo("SERVING")


def _channel(target: str, config: ServerConfig, certificate: Path | None, key: Path | None) -> grpc.Channel:
    """Return a channel that trusts this very server, whatever name its certificate has."""
    import grpc

    options: list[tuple[str, int | str]] = [("grpc.enable_http_proxy", 0)]  # the server is on this machine
    if config.tls_certificate is None or config.tls_key is None:
        return grpc.insecure_channel(target, options)
    from bf16kit.service.config.certificates import CertificateFiles

    own = CertificateFiles(config.tls_certificate, config.tls_key, config.tls_client_ca).current()
    client = None if config.tls_client_ca is None else own
    if client is not None and certificate is not None and key is not None:
        client = CertificateFiles(certificate, key).current()
    chain = (None, None) if client is None else (client.key, client.certificate)
    options.append(("grpc.ssl_target_name_override", own.name()))
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(own.certificate, *chain), options)


def _other_protocol(host: str, port: int, tls: bool, seconds: float) -> str:
    """Return what to do if the port speaks TLS and this command does not, or the other way round; "" if neither."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    try:
        with (
            socket.create_connection((host, port), seconds) as connection,
            context.wrap_socket(connection, server_hostname=host),
        ):
            return "" if tls else "; the server speaks TLS: give its --tls-certificate and --tls-key"
    except ssl.SSLError as error:
        plain = error.reason in ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING")
        return "; the server speaks plain text: leave --tls-certificate and --tls-key out" if tls and plain else ""
    except OSError:
        return ""


def _reason_not_ready(channel: grpc.Channel, model: str, seconds: float) -> str:
    """Return why the model, or the server for "", is not ready; "" if it is. Waits at most ``seconds``."""
    import grpc
    from grpc_health.v1 import health_pb2

    what = f"model {quoted(model)}" if model else "server"
    call: grpc.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse] = (
        channel.unary_unary(
            _CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
    )
    try:
        status = call(health_pb2.HealthCheckRequest(service=model), timeout=seconds).status
    except grpc.RpcError as error:
        code, details = error.code(), brief(error.details() or "")
        if "http1.x" in details:
            details = "this is an HTTP port; give the gRPC port"
        known = {
            grpc.StatusCode.NOT_FOUND: f"serves no {what}",
            grpc.StatusCode.DEADLINE_EXCEEDED: f"no answer within {seconds:g} s",
            grpc.StatusCode.UNAVAILABLE: f"{_UNREACHABLE}: {details}",
        }
        return known.get(code, f"{code.name}: {details}")
    if status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return (
        f"{health_pb2.HealthCheckResponse.ServingStatus.Name(status)}: {what} is not ready; the server's log says why"
    )


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
    connection = http.client.HTTPConnection(host, port, timeout=_EVIDENCE_SECONDS)
    if parts.scheme == "http" and any(files):
        raise UsageError(f"--ca, --certificate and --key need --server https://HOST:PORT, not {server!r}")
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(host, port, timeout=_EVIDENCE_SECONDS, context=_context(*files))
    where = f"{host}:{port}"
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        response = connection.getresponse()
        data = response.read(MOST_BYTES + 1)
    except ssl.SSLError as error:
        text = error.reason.lower().replace("_", " ") if error.reason else brief(error)
        raise UsageError(f"{where}: no TLS connection: {text}; give --ca, or http://{where}") from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        reason = brief(error) or type(error).__name__
        if isinstance(error, http.client.HTTPException) and parts.scheme == "http":
            reason += f"; if it speaks TLS, give https://{where}"
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
    from bf16kit.service.config.tokens import is_token, read_tokens

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
