"""The kernel's table as a picture: ratio to a base over rows, an SVG that follows light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]  # (rows, ratio)

_WIDTH, _HEIGHT = 880, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 168, 74, 58
_LABEL_STEP = 17  # pixels between the labels at the right end, at least

_STYLE = """
    svg { --paper: #ffffff; --ink: #0f172a; --soft: #64748b; --rule: #e2e8f0; --band: #fef3c7; --goal: #b45309;
          --a: #1d4ed8; --b: #0f766e; --c: #a21caf; --p: #94a3b8 }
    @media (prefers-color-scheme: dark) {
      svg { --paper: #0d1117; --ink: #e6edf3; --soft: #9da7b3; --rule: #262c36; --band: #2d2410; --goal: #f0b429;
            --a: #6ea8fe; --b: #34d399; --c: #e879f9; --p: #7d8794 }
    }
    .paper { fill: var(--paper) } .ink { fill: var(--ink) } .soft { fill: var(--soft) }
    .rule { stroke: var(--rule) } .one { stroke: var(--ink); stroke-width: 1.4 }
    .band { fill: var(--band) } .goal { stroke: var(--goal); stroke-width: 1.8; fill: none }
    .goal-text { fill: var(--goal) }
    .ours { fill: none; stroke-width: 2.8; stroke-linejoin: round } .peer { fill: none; stroke-width: 1.4 }
    .c0 { stroke: var(--a) } .c1 { stroke: var(--b) } .d0 { fill: var(--a) } .d1 { fill: var(--b) }
    .c2 { stroke: var(--c) } .d2 { fill: var(--c) }
    .cp { stroke: var(--p) } .dp { fill: var(--soft) }
    text { font-family: ui-sans-serif, Helvetica, Arial, sans-serif; font-size: 13px }
    .title { font-size: 17px; font-weight: 600 } .strong { font-weight: 600 }
"""
_DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 4")


@dataclass(frozen=True, slots=True)
class Line:
    """What one side reached. ``ours`` are drawn strong and in colour, peers thin and grey."""

    name: str
    points: Points
    ours: bool


@dataclass(frozen=True, slots=True)
class Plane:
    """Where rows (in powers of two) and ratios are on the picture."""

    last: float  # rows
    top: float  # ratio

    def x(self, rows: float) -> float:
        return _LEFT + math.log2(rows) / math.log2(self.last) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, ratio: float) -> float:
        return _HEIGHT - _BOTTOM - min(ratio, self.top) / self.top * (_HEIGHT - _TOP - _BOTTOM)


def draw(lines: Sequence[Line], targets: Mapping[int, float], *, base: str, title: str, subtitle: str) -> str:
    """The picture. ``targets`` maps each row count that has one to its goal; ``base`` is what ratios are to."""
    rows = sorted({int(x) for line in lines for x, _ in line.points})
    highest = max([*targets.values(), *(y for line in lines for _, y in line.points)])
    plane = Plane(rows[-1], math.ceil(highest * 2 + 0.2) / 2)
    described = "; ".join(f"{line.name}: {_spoken(line.points)}" for line in lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
        ' role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(title)}</title>',
        f'<desc id="d">{escape(subtitle)}. Ratios by rows: {escape(described)}.</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>',
        _text(_LEFT, 30, title, "ink title"),
        _text(_LEFT, 51, subtitle, "soft"),
        *_goals(plane, targets, rows, _axes(plane, rows)),
        *_lines(plane, lines, base),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _spoken(points: Points) -> str:
    return ", ".join(f"{int(rows)} {ratio:.2f}" for rows, ratio in points)


# --- parts ------------------------------------------------------------------------------------------------------------


def _axes(plane: Plane, rows: Sequence[int]) -> Iterator[str]:
    right = _WIDTH - _RIGHT
    for half in range(int(plane.top * 2) + 1):
        ratio, y = half / 2, plane.y(half / 2)
        if ratio != 1:
            yield f'<line class="rule" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(_LEFT - 10, y + 4.5, f"{ratio:g}×", "soft", anchor="end")
    y = plane.y(1)
    yield f'<line class="one" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
    bottom = _HEIGHT - _BOTTOM
    for count in rows:
        x = plane.x(count)
        yield f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}"/>'
        if math.log2(count).is_integer():  # those between are ticks: their numbers would run into each other
            yield _text(x, bottom + 21, str(count), "soft", anchor="middle")
    middle = (_LEFT + right) / 2
    yield _text(middle, _HEIGHT - 14, "rows of the batch (log₂)", "soft", anchor="middle")


def _goals(plane: Plane, targets: Mapping[int, float], rows: Sequence[int], axes: Iterable[str]) -> Iterator[str]:
    """The targets as steps, each half-way to its neighbours; ``axes`` between their area and line."""
    firsts = sorted(first for first in targets if first <= rows[-1])
    edges = [float(rows[0])]
    edges += [math.sqrt(first * max(row for row in rows if row < first)) for first in firsts[1:]]
    edges.append(math.sqrt(firsts[-1] * min((row for row in rows if row > firsts[-1]), default=firsts[-1])))
    path = []
    for index, first in enumerate(firsts):
        y = plane.y(targets[first])
        path += [f"{plane.x(edges[index]):.1f} {y:.1f}", f"{plane.x(edges[index + 1]):.1f} {y:.1f}"]
    floor = plane.y(0)
    area = [*path, f"{plane.x(edges[-1]):.1f} {floor:.1f}", f"{plane.x(edges[0]):.1f} {floor:.1f}"]
    yield f'<path class="band" d="M{" L".join(area)} Z"/>'
    yield from axes
    yield f'<path class="goal" stroke-dasharray="6 4" d="M{" L".join(path)}"/>'
    for index, first in enumerate(firsts):
        x = (plane.x(edges[index]) + plane.x(edges[index + 1])) / 2
        yield _text(x, floor - 10, f"≥ {targets[first]:g}", "goal-text", anchor="middle")
    yield _text(plane.x(edges[-1]) + 8, floor - 10, "goals of cpu", "goal-text")


def _lines(plane: Plane, lines: Sequence[Line], base: str) -> Iterator[str]:
    styles = list(_styles(lines))
    for line, (stroke, _, dash) in sorted(zip(lines, styles, strict=True), key=lambda pair: pair[0].ours):
        path = " L".join(f"{plane.x(rows):.1f} {plane.y(ratio):.1f}" for rows, ratio in line.points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        yield f'<path class="{"ours" if line.ours else "peer"} {stroke}"{dashes} d="M{path}"/>'
    for line, (_, fill, _) in zip(lines, styles, strict=True):
        if line.ours:
            for rows, ratio in line.points:
                yield f'<circle class="{fill}" cx="{plane.x(rows):.1f}" cy="{plane.y(ratio):.1f}" r="3.4"/>'
    yield from _labels(plane, lines, [fill for _, fill, _ in styles], base)


def _styles(lines: Iterable[Line]) -> Iterator[tuple[str, str, str]]:
    """Classes of stroke and of fill, and dashes, for each line."""
    ours = peers = 0
    for line in lines:
        if line.ours:
            yield f"c{ours % 3}", f"d{ours % 3}", "" if ours == 0 else "9 3"
            ours += 1
        else:
            yield "cp", "dp", _DASHES[peers % len(_DASHES)]
            peers += 1


def _labels(plane: Plane, lines: Sequence[Line], fills: Sequence[str], base: str) -> Iterator[str]:
    """Names at the right end, moved apart where lines end close together, each tied to its line."""
    labels = [
        (plane.y(line.points[-1][1]), line.name, fill, line.ours) for line, fill in zip(lines, fills, strict=True)
    ]
    labels.append((plane.y(1), base, "ink", False))
    labels.sort(key=lambda label: label[0])
    positions = _spread_out([y for y, *_ in labels])
    right = _WIDTH - _RIGHT
    for (y, name, fill, strong), position in zip(labels, positions, strict=True):
        yield f'<path class="peer cp" d="M{right + 3} {y:.1f} L{right + 14} {position:.1f}"/>'
        yield _text(right + 18, position + 4.5, name, f"{fill} strong" if strong else fill)


def _spread_out(positions: Sequence[float]) -> list[float]:
    """Ascending ``positions`` moved as little as a few rounds need until neighbours are far enough apart."""
    moved = list(positions)
    for _ in range(200):
        for index in range(len(moved) - 1):
            missing = _LABEL_STEP - (moved[index + 1] - moved[index])
            if missing > 0:
                moved[index] -= missing / 2
                moved[index + 1] += missing / 2
    return moved


def _text(x: float, y: float, content: str, kind: str, *, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'
