"""``bf16-serve health``: asks the server on this machine whether it is ready, for health checks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bf16kit.messages.errors import Bf16kitError, ConfigError
from bf16kit.messages.wording import brief, quoted
from bf16kit.system import controlgroup
from service.commands import output

if TYPE_CHECKING:
    import grpc

    from service.config.serverconfig import ServerConfig

_CHECK = "/grpc.health.v1.Health/Check"
_FILE = click.Path(path_type=Path)
_WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 -- listened on, not by us


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
    from service.config.serverconfig import load_config

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
    from service.config.certificates import CertificateFiles

    own = CertificateFiles(config.tls_certificate, config.tls_key, config.tls_client_ca).current()
    client = None if config.tls_client_ca is None else own
    if client is not None and certificate is not None and key is not None:
        client = CertificateFiles(certificate, key).current()
    chain = (None, None) if client is None else (client.key, client.certificate)
    options.append(("grpc.ssl_target_name_override", own.name()))
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(own.certificate, *chain), options)


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
        known = {
            grpc.StatusCode.NOT_FOUND: f"serves no {what}",
            grpc.StatusCode.DEADLINE_EXCEEDED: f"no answer within {seconds:g} s",
            grpc.StatusCode.UNAVAILABLE: f"no server can be reached there: {details}",
        }
        return known.get(code, f"{code.name}: {details}")
    if status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return (
        f"{health_pb2.HealthCheckResponse.ServingStatus.Name(status)}: {what} is not ready; the server's log says why"
    )
