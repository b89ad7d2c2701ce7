"""``bf16-serve list``: lists what a repository holds, and which of it would be served."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from service.commands import output


@click.command("list")
@output.repository
@output.config_file
@output.as_json
def list_models(repository: str | None, file: Path | None, as_json: bool) -> None:
    """List models and versions: which would be served, their profiles, sizes, and drift as it was measured.

    Reads manifests and the names and sizes of files, never the weights: `check` looks at those. Exit codes: 0; 1 where
    something in the repository cannot be served; 2 wrong usage.
    """
    from service.commands.listing import VERSION, read_repository, text
    from service.config.serverconfig import load_config

    with output.exit_on_errors("list"):
        config = load_config({"repository": repository}, file)
        rows = read_repository(config.repository)
    if as_json:
        output.echo_json({"version": VERSION, "repository": str(config.repository), "models": rows})
    else:
        output.echo(text(config.repository, rows))
    sys.exit(output.FAILED if any(row.problem for row in rows) else 0)
