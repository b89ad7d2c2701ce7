"""The kernel's table as a picture: ratio to a base over rows, an SVG that follows light and dark mode."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converter.report.charts import COLOUR, axes, drawing, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]  # (rows, ratio)

_WIDTH, _HEIGHT = 880, 480
_LABEL_STEP = 17  # pixels between the labels at the right end, at least
_STYLE = """<style>
svg { --paper: #fff; --text: #0f172a; --muted: #64748b; --grid: #e2e8f0; --zone: #fef3c7; --target: #b45309;
  --accent: #1d4ed8; --second: #0f766e; --third: #a21caf; background: var(--paper); font-family: sans-serif }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --text: #e6edf3; --muted: #9da7b3; --grid: #262c36; --zone: #2d2410; --target: #f0b429;
    --accent: #6ea8fe; --second: #34d399; --third: #e879f9 }
}
</style>"""
_OURS = ("accent", "second", "third")
_DASHES = ("-", (0, (7, 4)), ":", "-.", (0, (4, 4)))


@dataclass(frozen=True, slots=True)
class Line:
    """What one side reached. ``ours`` are drawn strong and in colour, peers thin and grey."""

    name: str
    points: Points
    ours: bool


@drawing()
def draw(lines: Sequence[Line], targets: Mapping[int, float], *, base: str, title: str, subtitle: str) -> str:
    """The picture. ``targets`` maps each row count that has one to its goal; ``base`` is what ratios are to."""
    rows = sorted({int(x) for line in lines for x, _ in line.points})
    highest = max([*targets.values(), *(y for line in lines for _, y in line.points)])
    top = math.ceil(highest * 2 + 0.2) / 2
    plane = axes(_HEIGHT, _WIDTH, left=64, right=168, top=74, bottom=58)
    plane.set_xscale("log", base=2)
    plane.set(xlim=(rows[0], rows[-1]), ylim=(0, top), xlabel="rows of the batch (log₂)")
    whole = [count for count in rows if math.log2(count).is_integer()]  # numbers of the others would touch
    plane.set_xticks(whole, [str(count) for count in whole])
    plane.set_yticks([half / 2 for half in range(int(top * 2) + 1)])
    plane.yaxis.set_major_formatter("{x:g}×")
    plane.figure.text(64 / _WIDTH, 1 - 30 / _HEIGHT, title, size=17, weight="bold")
    plane.figure.text(64 / _WIDTH, 1 - 51 / _HEIGHT, subtitle, size=13, color=COLOUR["muted"])
    _goals(plane, rows, targets)
    plane.axhline(1, color=COLOUR["text"], linewidth=1.4)
    ends = [(1.0, base, COLOUR["text"], False)]
    for number, line in enumerate(sorted(lines, key=lambda line: not line.ours)):
        number -= 0 if line.ours else sum(each.ours for each in lines)
        colour = COLOUR[_OURS[number % len(_OURS)] if line.ours else "muted"]
        dash = ("--" if number else "-") if line.ours else _DASHES[number % len(_DASHES)]
        strong: dict[str, Any] = {"linewidth": 2.8, "marker": "o", "zorder": 3} if line.ours else {"linewidth": 1.4}
        plane.plot(*zip(*line.points, strict=True), linestyle=dash, color=colour, clip_on=False, **strong)
        ends.append((line.points[-1][1], line.name, colour, line.ours))
    pixel = top / (_HEIGHT - 74 - 58)
    ends.sort(key=lambda end: end[0])
    places = _spread_out([y for y, *_ in ends], _LABEL_STEP * pixel)
    for (y, name, colour, ours), place in zip(ends, places, strict=True):
        plane.annotate(
            name,
            (1, y),
            (18, place / pixel - y / pixel),
            ("axes fraction", "data"),
            "offset points",
            color=colour,
            weight="bold" if ours else "normal",
            va="center",
            arrowprops={"arrowstyle": "-", "color": COLOUR["muted"], "relpos": (0, 0.5)},
        )
    described = "; ".join(f"{line.name}: {_spoken(line.points)}" for line in lines)
    return svg(plane, "kernel", title, f"{subtitle}. Ratios by rows: {described}.", style=_STYLE) + "\n"


def _spoken(points: Points) -> str:
    return ", ".join(f"{int(rows)} {ratio:.2f}" for rows, ratio in points)


def _goals(plane: Axes, rows: Sequence[int], targets: Mapping[int, float]) -> None:
    """Draw the goals as steps, which end half-way to their neighbours."""
    firsts = sorted(first for first in targets if first <= rows[-1])
    edges = [float(rows[0])]
    edges += [math.sqrt(first * max(row for row in rows if row < first)) for first in firsts[1:]]
    edges.append(math.sqrt(firsts[-1] * min((row for row in rows if row > firsts[-1]), default=firsts[-1])))
    floor = 0.03 * plane.get_ylim()[1]
    for first, start, end in zip(firsts, edges, edges[1:], strict=False):
        plane.text(math.sqrt(start * end), floor, f"≥ {targets[first]:g}", ha="center", color=COLOUR["target"])
    x = [edge for pair in itertools.pairwise(edges) for edge in pair]
    y = [targets[first] for first in firsts for _ in range(2)]
    plane.fill_between(x, y, color=COLOUR["zone"], linewidth=0, zorder=0)
    plane.plot(x, y, "--", color=COLOUR["target"])
    plane.text(edges[-1] * 1.05, floor, "goals of cpu", color=COLOUR["target"])


def _spread_out(positions: Sequence[float], step: float) -> list[float]:
    """Ascending ``positions`` moved as little as a few rounds need until neighbours are far enough apart."""
    moved = list(positions)
    for _ in range(200):
        for index in range(len(moved) - 1):
            missing = step - (moved[index + 1] - moved[index])
            if missing > 0:
                moved[index] -= missing / 2
                moved[index + 1] += missing / 2
    return moved
