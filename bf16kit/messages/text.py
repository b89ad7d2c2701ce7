"""Text for users: tables that fit the width of a terminal, and lists of names in sentences."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Iterable, Sequence

_NARROWEST = 120  # columns; below this, wrapped lines are easier to read than cells cut into pieces
_UNITS = ("kB", "MB", "GB", "TB")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table under ``title``; floats are shown with three digits, None as a dash."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(_cell(value)) for value in row))
    stream = io.StringIO()
    width = max(_NARROWEST, shutil.get_terminal_size().columns)
    Console(file=stream, no_color=True, width=width).print(drawn)
    lines = stream.getvalue().rstrip().splitlines()
    return "\n".join([title, *(line.rstrip() for line in lines)])  # rich would wrap its own title at the table's width


def listed(names: Sequence[str]) -> str:
    """Join one or more names for a sentence: ``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def printable(text: str, keep: str = "\n") -> str:
    """Escape every control character in ``text`` that is not in ``keep``, because the names in it may be hostile."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def size(count: float) -> str:
    """Format a number of bytes for users: ``90.9 MB``."""
    if count < 1000:
        return f"{count:.0f} bytes"
    power = min(int(math.log10(count) // 3), len(_UNITS))
    return f"{count / 1000**power:.1f} {_UNITS[power - 1]}"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else printable(str(value), keep="")
