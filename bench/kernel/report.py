"""``python -m bench.kernel.report``: README's table and claim, docs/kernel.md and its picture, from the results.

Measures nothing. Results that are not fit to be published (:mod:`bench.core.publishing`) change nothing, and the
reason is said.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.core import publishing, results
from bench.core.grid import Grid
from bench.core.publishing import Published
from bench.kernel import layers, published
from bench.kernel.compare import best
from bench.kernel.picture import Line, draw
from bench.kernel.sides import PEERS, path_of

_ROOT = Path(__file__).parents[2]
_BLOCKS = {"claim": published.claim, "tables": published.tables, "goals": published.goals}
BLOCKS_OF = {"README.md": ("claim", "tables"), "docs/kernel.md": ("goals",)}  # under the checkout's root
PICTURE = "docs/pictures/kernel.svg"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code: 1 when these results cannot be published."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernel.report", description="The CPU kernel's numbers.")
    parser.add_argument("--results", type=Path, default=results.here(), help="where results are, bench/results/MACHINE")
    parser.add_argument("--into", type=Path, default=_ROOT, help=f"the tree of {', '.join(BLOCKS_OF)} and {PICTURE}")
    chosen = parser.parse_args(arguments)
    for reason in publishing.refusals(chosen.results):
        print(f"not published: {reason}", file=sys.stderr)
    found = publishing.read(chosen.results)
    if "kernel" not in found.contents:
        print(f"nothing to publish in {chosen.results}: run make bench-kernel on a quiet machine", file=sys.stderr)
        return 1
    for name, blocks in BLOCKS_OF.items():
        page = chosen.into / name
        page.write_text(with_blocks(page.read_text("utf-8"), every(chosen.results.parent), blocks), "utf-8")
    drawn = chosen.into / PICTURE
    drawn.parent.mkdir(parents=True, exist_ok=True)
    drawn.write_text(picture(found), "utf-8")
    print(published.tables([found]), published.goals([found]), sep="\n")
    print(f"into {chosen.into}: {', '.join(BLOCKS_OF)}, {PICTURE}")
    return 0


def every(root: Path) -> list[Published]:
    """What is fit to be published of all kinds of machines whose layers were measured."""
    return [found for found in publishing.every(root) if "kernel" in found.contents]


def with_blocks(text: str, found: Sequence[Published], blocks: Sequence[str]) -> str:
    """A page's ``text`` with what the results say between the marks of ``blocks``."""
    for name in blocks:
        before, begin, rest = text.partition(f"<!-- {name}: written by make bench-kernel -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->\n")
        assert begin, f"there is no mark for {name}"
        assert end, f"there is no end of {name}"
        text = before + begin + _BLOCKS[name](found) + end + after
    return text


# --- the picture ------------------------------------------------------------------------------------------------------


def picture(of: Published) -> str:
    """How many times as fast as the best fp32 peer everyone is on the layers."""
    machine, grid = of.contents["kernel"]["machine"], Grid.from_dict(of.contents["kernel"]["grids"][0])
    return draw(
        list(lines(grid)),
        layers.CPU,
        base="the best fp32 peer",
        title=f"{layers.LAYERS} layers of 4096×4096: bf16 weights in our kernel, and others",
        subtitle="time of the best fp32 peer ÷ time, cold caches, medians;"
        f" {machine['cores']} cores of {machine['cpu']}, {machine['date']}",
    )


def lines(grid: Grid) -> Iterator[Line]:
    """Our profiles, and every peer at the best of its settings."""
    rows = {label: dict(zip(grid.columns, row, strict=True)) for label, row in grid.rows.items()}
    samples = {label: {n: [[[ms]]] for n, ms in row.items() if ms is not None} for label, row in rows.items()}
    for profile in ("cpu", "cpu-bf16"):
        ours = {label: path_of(profile, found) for label, found in samples.items()}
        yield from _line(profile, rows, ours, samples, ours=True)
    yield from _line("cpu on AVX2", rows, dict.fromkeys(rows, "cpu, avx2"), samples, ours=True)
    for library in ("OpenVINO bf16", "torch bf16", "ONNX Runtime fp32", "OpenVINO fp32"):
        names = [peer.name for peer in PEERS if peer.name.startswith(library)]
        chosen = {
            label: min((n for n in names if n in found), key=lambda n: found[n][0][0][0], default=None)
            for label, found in samples.items()
        }
        yield from _line(library, rows, chosen, samples, ours=False)


def _line(
    name: str,
    rows: Mapping[str, Mapping[str, float | None]],
    sides: Mapping[str, str | None],
    samples: Mapping[str, Mapping[str, Sequence[Sequence[Sequence[float]]]]],
    *,
    ours: bool,
) -> Iterator[Line]:
    points = []
    for label, row in rows.items():
        base, mine = row.get(best("best fp32 peer", samples[label]) or ""), row.get(sides[label] or "")
        if base is not None and mine is not None:
            points.append((float(label.split()[0]), base / mine))
    if points:
        yield Line(name, points, ours)


if __name__ == "__main__":
    sys.exit(main())
