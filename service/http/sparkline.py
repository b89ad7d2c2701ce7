"""A line chart without axes, one point per tick: inline SVG in the page's colours, with its numbers in the label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

_HEIGHT = 40
_TOP = 2  # room for the line's own width
Format = Callable[[float | None], str]
Point = tuple[int, int]


def sparkline(
    name: str,
    span: str,
    points: Sequence[float | None],
    fmt: Format,
    *,
    length: int,
    bound: float | None = None,
) -> str:
    """Draw ``points``, the oldest first, aligned to the right edge, with room for ``length`` of them.

    A dashed line is drawn at ``bound``. ``fmt`` formats one value. A missing value leaves a gap. Without any value
    nothing is drawn, and the text says so.
    """
    points = points[-length:]
    known = [value for value in points if value is not None]
    if not known:
        return f'<p class="spark none">{escape(name)}: nothing to draw yet</p>'
    top = max(max(known), bound or 0.0) or 1.0
    label = f"{name}, {span}: last {fmt(known[-1])}, least {fmt(min(known))}, most {fmt(max(known))}"
    runs = _runs(points, length - len(points), top)
    limit = "" if bound is None else f'<path class="limit" d="M0 {_y(bound, top)}H{length - 1}"/>'
    return (
        f'<svg class="spark" viewBox="0 0 {length - 1} {_HEIGHT}" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(label)}"><path class="trace" d="{"".join(map(_path, runs))}"/>{limit}</svg>'
    )


def _runs(points: Sequence[float | None], first: int, top: float) -> list[list[Point]]:
    """Return the points between gaps, from x = ``first`` on, without the inner points of level stretches."""
    runs: list[list[Point]] = [[]]
    for x, value in enumerate(points, first):
        run = runs[-1]
        if value is None:
            if run:
                runs.append([])
            continue
        y = _y(value, top)
        if len(run) > 1 and run[-1][1] == run[-2][1] == y:
            run.pop()
        run.append((x, y))
    return [run for run in runs if run]


def _y(value: float, top: float) -> int:
    return _HEIGHT - round((_HEIGHT - _TOP) * min(value / top, 1.0))


def _path(run: Sequence[Point]) -> str:
    """Return the path from the ground line up, along the points and down again: line and area in one.

    Its steps are relative, which is shorter.
    """
    (x, y), *rest = run
    steps, at = "", (x, y)
    for point in rest:
        across, down = point[0] - at[0], point[1] - at[1]
        steps += f"{'l' if not steps else ' '}{across}{'' if down < 0 else ' '}{down}"
        at = point
    return f"M{x} {_HEIGHT}V{y}{steps}V{_HEIGHT}"
