"""``python tests/models/table.py`` updates docs/models.md from the figures of the last ``make test-models``."""

import re
from collections.abc import Sequence

from conversions import ROOT, Row, recorded

PAGE = ROOT / "docs" / "models.md"

_MARKS = re.compile(r"(<!-- models: .* -->\n).*(<!-- end of models -->\n)", re.DOTALL)
_HEAD = """\
| model | kind | package | licence | MB | bf16 | with residual | drift cpu | drift cuda | slice | islands | seconds |
|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|
"""


def text(rows: Sequence[Row]) -> str:
    """Return the table."""
    return _HEAD + "".join(f"{_line(row)}\n" for row in rows)


def _line(row: Row) -> str:
    islands = f"{row.islands} of {row.nodes}" if row.islands else "–"
    cells = (
        row.name,
        row.kind,
        row.package,
        row.licence,
        f"{row.source_bytes / 1e6:.2f}",
        f"{row.bf16_ratio:.3f} ×",
        f"{row.with_residual:.3f} ×",
        f"{row.cpu:.2g}" if row.cpu else "–",
        f"{row.cuda:.2g}" if row.cuda else "–",
        f"{row.worst_slice:.2g}",
        islands,
        f"{row.seconds:.0f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    page = PAGE.read_text("utf-8")
    begin, end = _MARKS.findall(page)[0]
    PAGE.write_text(_MARKS.sub(lambda _: begin + text(recorded()) + end, page), "utf-8")
