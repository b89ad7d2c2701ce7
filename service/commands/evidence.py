"""``bf16-serve evidence``: saves the evidence for the newest drift breach of a running server's model in a file."""

from __future__ import annotations

from pathlib import Path

import click

from service.commands import answer

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("model")
@click.option("--version", type=click.IntRange(min=1), metavar="N", help="Which.  [default: the newest]")
@click.option(
    "--server",
    default="127.0.0.1:8002",
    show_default=True,
    metavar="HOST:PORT",
    help="The server's HTTP port; https://HOST:PORT for one that speaks TLS.",
)
@click.option("--out", required=True, type=_FILE, metavar="FILE", help="To write; for its owner alone.")
@click.option("--force", is_flag=True, help="Replace a file that is there already.")
@click.option(
    "--token-file",
    type=_FILE,
    metavar="FILE",
    help="As the server's: the first token in it with the scope manage is shown.  [default: BF16KIT_TOKEN, or none]",
)
@click.option("--ca", type=_FILE, metavar="FILE", help="PEM, of the authority that the server's certificate is of.")
@click.option("--certificate", type=_FILE, metavar="FILE", help="PEM, to show to the server; with --key.")
@click.option("--key", type=_FILE, metavar="FILE", help="Its key.")
def evidence(model: str, version: int | None, out: Path, force: bool, **given: object) -> None:
    """Fetch what the last breach of MODEL is shown by: one live row, what was answered, what the reference answers.

    The server must have been started with --evidence. The file holds what a client sent; `bf16-convert explain FILE
    --artifact DIRECTORY` tells which layer left the line on it. Exit codes: 0; 1 there is none, or it is not given;
    2 wrong usage.
    """
    from service.commands.fetching import Door, check_free, fetch, write

    with answer.expected("evidence"):
        check_free(out, force=force)
        door = Door.of(**given)  # type: ignore[arg-type]  # click has checked them
        found = fetch(door, model, version)
        write(out, found.data, force=force)
    answer.say(found.told(out))
