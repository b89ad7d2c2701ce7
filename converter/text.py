"""Text for terminals: tables that fit the width there is."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Sequence

_NARROWEST = 120  # columns; a line that wraps in a narrow window is easier to read than cells cut into pieces


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table under ``title``; floats are shown with three digits, None as a dash."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(_cell(value)) for value in row))
    stream = io.StringIO()
    width = max(_NARROWEST, shutil.get_terminal_size().columns)
    Console(file=stream, no_color=True, width=width).print(drawn)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip().splitlines())


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
