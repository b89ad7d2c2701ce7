"""``bf16-serve health``: asks the server on this machine whether it is ready, for health checks."""

from __future__ import annotations

import os
from pathlib import Path

import click

from bf16kit.system import controlgroup
from service.commands import output

_FILE = click.Path(path_type=Path)


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
    from bf16kit.messages.errors import Bf16kitError
    from service.commands.localserver import LocalServer
    from service.grpc.healthclient import check

    try:
        if (certificate is None) != (key is None):
            raise Bf16kitError("give --certificate and --key together")
        status = check(LocalServer(flags, file).endpoint(certificate, key), model, seconds)
    except Bf16kitError as error:
        output.fail("health", str(error), output.FAILED)
    output.echo(status)
