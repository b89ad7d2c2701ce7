"""``bf16-serve evidence``: saves the evidence for the newest drift breach of a running server's model in a file."""

from __future__ import annotations

from pathlib import Path

import click

from service.commands import output

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("model")
@click.option("--version", type=click.IntRange(min=1), metavar="N", help="Version of MODEL.  [default: the newest]")
@click.option(
    "--server",
    default="127.0.0.1:8002",
    show_default=True,
    metavar="HOST:PORT",
    help="The server's HTTP port; https://HOST:PORT if it uses TLS.",
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
def evidence(model: str, version: int | None, out: Path, force: bool, **given: object) -> None:
    """Fetch the evidence for MODEL's newest drift breach: one live row, its response and the reference's response.

    The server must have been started with --evidence. The file holds a client's data; `bf16-convert explain FILE
    --artifact DIRECTORY` names the layer that diverged on it. Exit codes: 0; 1 no evidence, or access denied;
    2 wrong usage.
    """
    from service.commands.fetching import Endpoint, check_free, fetch, write

    with output.exit_on_errors("evidence"):
        check_free(out, force=force)
        endpoint = Endpoint.of(**given)  # type: ignore[arg-type]  # click has checked them
        found = fetch(endpoint, model, version)
        write(out, found.data, force=force)
    output.echo(found.summary(out))
