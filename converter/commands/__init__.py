"""The commands of ``bf16-convert``, one file per group, with what they share: options and printing.

A command imports heavy modules only when it runs.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import click

from bf16kit.messages.wording import printable


class _LocalPath(click.Path):
    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        if "://" in str(value):
            self.fail(f"{value!r} is a URL: give a file or directory of this machine", parameter, context)
        return super().convert(value, parameter, context)


PATH = _LocalPath(path_type=Path)

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


def echo_wrapped(text: str) -> None:
    """Print ``text``; on a terminal, wrap its long lines with an indent, but not those of tables."""
    if sys.stdout.isatty():
        wrapping = textwrap.TextWrapper(
            shutil.get_terminal_size().columns,
            subsequent_indent=" " * 12,
            break_long_words=False,  # paths
            break_on_hyphens=False,
        )
        text = "\n".join(line if line.startswith(" ") else wrapping.fill(line) for line in text.split("\n"))
    echo(text)
