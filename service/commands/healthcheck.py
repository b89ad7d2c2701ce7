"""``bf16-serve health``: asks the server on this machine whether it is ready, for health checks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bf16kit.system import controlgroup
from service.commands import output

if TYPE_CHECKING:
    from service.config.serverconfig import ServerConfig
    from service.grpc.healthclient import ClientTls

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
    from bf16kit.messages.errors import Bf16kitError, ConfigError
    from service.config.serverconfig import load_config
    from service.grpc.healthclient import Endpoint, check

    try:
        if (certificate is None) != (key is None):
            raise ConfigError("give --certificate and --key together")
        config = load_config({"repository": "/", **flags}, file)  # the repository does not matter here
        if config.grpc_port == 0:
            raise ConfigError("grpc_port 0: give the port that the server listens on, 1 to 65535")
        host = _WILDCARD_HOSTS.get(config.host, config.host)
        target = f"[{host}]:{config.grpc_port}" if ":" in host else f"{host}:{config.grpc_port}"
        status = check(Endpoint(target, _trust(config, certificate, key)), model, seconds)
    except Bf16kitError as error:
        output.fail("health", str(error), output.FAILED)
    output.echo(status)


def _trust(config: ServerConfig, certificate: Path | None, key: Path | None) -> ClientTls | None:
    """Return how to trust this very server, whatever name its certificate has; None without TLS."""
    if config.tls_certificate is None or config.tls_key is None:
        return None
    from service.config.certificates import CertificateFiles
    from service.grpc.healthclient import ClientTls

    own = CertificateFiles(config.tls_certificate, config.tls_key, config.tls_client_ca).current()
    if config.tls_client_ca is None:
        return ClientTls(own.certificate, own.name())
    client = own if certificate is None or key is None else CertificateFiles(certificate, key).current()
    return ClientTls(own.certificate, own.name(), client.certificate, client.key)
