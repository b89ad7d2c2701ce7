"""Builds pieces of HTML.

Text arguments are escaped; arguments that already are HTML are called ``cell``, ``body`` or such.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape


def code(text: str) -> str:
    """Format a program's name or identifier."""
    return f"<code>{escape(text)}</code>"


def figure(name: str, value: str, note: str = "", *, over: bool = False, picture: str = "") -> str:
    """A number with its name, in a ``dl``."""
    small = f"<small>{escape(note)}</small>" if note else ""
    kind = ' class="over"' if over else ""
    return f"<div><dt>{escape(name)}</dt><dd><span{kind}>{escape(value)}</span>{small}{picture}</dd></div>"


def fact(name: str, cell: str) -> str:
    """A line of a ``dl``."""
    return f"<dt>{escape(name)}</dt><dd>{cell}</dd>"


Rows = Iterable[Sequence[str]]


def table(caption: str, columns: Sequence[str], rows: Rows, *, text_columns: int = 1, wide: int = 0) -> str:
    """Return a table. Cells are HTML.

    The first of ``columns`` names the row. The first ``text_columns`` columns hold text, the others numbers. The last
    ``wide`` columns are hidden on a phone.
    """
    return grouped_table(caption, columns, {"": rows}, text_columns=text_columns, wide=wide)


def grouped_table(
    caption: str, columns: Sequence[str], groups: Mapping[str, Rows], *, text_columns: int = 1, wide: int = 0
) -> str:
    """Return a :func:`table` whose rows are in groups, each under its name, which is HTML."""
    kinds = [_kind(at >= text_columns, at >= len(columns) - wide) for at in range(len(columns))]
    head = "".join(f'<th scope="col"{kind}>{escape(column)}</th>' for column, kind in zip(columns, kinds, strict=True))
    bodies = "\n".join(_body(name, rows, kinds) for name, rows in groups.items())
    return f"<table>\n<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n{bodies}\n</table>"


def _kind(number: bool, wide: bool) -> str:
    names = " ".join(name for name, wanted in (("number", number), ("wide", wide)) if wanted)
    return f' class="{names}"' if names else ""


def _body(name: str, rows: Rows, kinds: Sequence[str]) -> str:
    title = f'<tr><th class="group" scope="rowgroup" colspan="{len(kinds)}">{name}</th></tr>\n' if name else ""
    return f"<tbody>\n{title}" + "\n".join(_row(cells, kinds) for cells in rows) + "\n</tbody>"


def _row(cells: Sequence[str], kinds: Sequence[str]) -> str:
    first, *rest = cells
    data = "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(rest, kinds[1:], strict=True))
    return f'<tr><th scope="row">{first}</th>{data}</tr>'


def details(summary: str, body: str) -> str:
    """Return a block that stays folded until a reader opens it."""
    return f"<details>\n<summary>{escape(summary)}</summary>\n{body}\n</details>"


def meter(used: float) -> str:
    """Draw the used share of a whole. The number stands beside it."""
    kind, width = "used full" if used > 1 else "used", min(100.0, 100 * used)
    return (
        '<svg class="meter" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="track" width="100" height="10"/><rect class="{kind}" width="{width:.0f}" height="10"/></svg>'
    )
