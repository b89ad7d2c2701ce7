"""``bf16-convert doctor``: reports what is installed, and what can be converted with it."""

from __future__ import annotations

import click

from converter.commands.common import debug_option, echo, json_option


@click.command()
@json_option
@debug_option
def doctor(as_json: bool, debug: bool) -> None:
    """Show what is installed, what can be converted now, and the commands that install what is missing."""
    from bf16kit.messages import document
    from converter.doctor.findings import describe, record

    echo(document.dumps(record()) if as_json else describe())
