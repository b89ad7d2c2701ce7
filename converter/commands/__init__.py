"""The commands of ``bf16-convert``, one file per group, with what they share: options and printing.

A command imports heavy modules only when it runs.
"""

from __future__ import annotations

from pathlib import Path

import click

from bf16kit.messages.wording import printable

PATH = click.Path(path_type=Path)

samples_option = click.option(
    "--samples", metavar="FILE|DIR|PKG.MOD:FN", help="Inputs to run the model on.  [default: the golden samples]"
)
debug_option = click.option("--debug", is_flag=True, help="Show the traceback of an error.")
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Write JSON for programs (docs/json.md describes it)."
)


def echo(text: str) -> None:
    """Print ``text`` with its control characters made harmless."""
    click.echo(printable(text))
