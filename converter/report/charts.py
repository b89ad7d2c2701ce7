"""The charts of the report: drift by sample, and SQNR by depth.

Colour alone never carries a meaning: what is over its bound is a square, predictions are dashed, every line is
labelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bf16kit.drift.measurements import MARGIN_DB, MOST_DB
from bf16kit.drift.verdicts import SampleSeries
from converter.report.layers import LayerSeries, layer_name, shortfall
from converter.report.svg import COLOUR, axes, drawing, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOTS = 500  # in one chart; more cannot be told apart
_HEIGHT = 280.0
Point = tuple[float, float, bool, str]  # x, y, whether it is over its bound, what to say of it


@drawing()
def samples_chart(series: SampleSeries, key: str) -> str:
    """Draw relative_l2 of each sample, with a line for each bound of the budget."""
    values = [math.inf if math.isnan(value) else value for value in series.values]
    top = max([*filter(math.isfinite, values), *(bound for _, bound in series.bounds), 1e-12]) * 1.08
    limit = dict(series.bounds).get("relative_l2", math.inf)
    shown = [(series.index(row), values[row]) for row in sampled_points(values)]
    over = sum(value > limit for value in values)
    points = [(at, min(value, top), value > limit, f"sample {at}: {value:.3g}") for at, value in shown]
    description = (
        f"{len(shown)} of {series.measured} samples: relative_l2 from {min(values, default=0):.3g} to"
        f" {max(values, default=0):.3g}"
        + "".join(f"; the budget bounds {_statistic(name)} at {bound:.3g}" for name, bound in series.bounds)
        + (f"; {over} samples are above the line" if over else "")
    )
    plane = _plane("sample", series.measured - 1, "relative_l2", (0, top))
    for side, (name, bound) in enumerate(series.bounds):
        label, at = f"budget of {_statistic(name)}: {bound:.3g}", (0.0 if side % 2 else 1.0, bound)
        above: dict[str, Any] = {"textcoords": "offset points", "ha": "left" if side % 2 else "right"}
        plane.axhline(bound, color=COLOUR["bad"])
        plane.annotate(label, at, (0, 4), ("axes fraction", "data"), color=COLOUR["bad"], **above)
    tips = _mark(plane, points)
    return svg(plane, key, f"Drift of {series.output} by sample, {series.profile}", description, tips)


@drawing()
def layers_chart(series: LayerSeries, key: str) -> str:
    """Draw the SQNR of each layer against its depth, with the SQNR predicted for rounding to bf16 alone."""
    values = [value for row in series.rows for value in (row.sqnr_db, row.expected_db)]
    finite = [value for value in values if abs(value) < MOST_DB] or [0.0]
    low, high = min(finite), max(finite)
    bottom = min(0.0, low) if low < 12 else low - 6
    drawn = [row for row in series.rows if row.sqnr_db < MOST_DB]
    exact = len(series.rows) - len(drawn)
    points = [
        (
            row.depth,
            max(row.sqnr_db, bottom),
            shortfall(row) > MARGIN_DB,
            f"{layer_name(row)} ({row.name}, {row.op}): {row.sqnr_db:.1f} dB, predicted {row.expected_db:.1f}",
        )
        for row in (drawn[place] for place in sampled_points([shortfall(row) for row in drawn]))
    ]
    off = series.first_off
    description = (
        f"{len(points)} of {series.measured} layers, in dB; {f'{exact} exact ones are left out; ' if exact else ''}"
        + (
            "none is below the SQNR predicted for rounding to bf16."
            if off is None
            else f"the first below its predicted SQNR is {layer_name(off)}: {off.sqnr_db:.3g} dB, predicted"
            f" {off.expected_db:.3g}."
        )
    )
    depths: dict[int, list[float]] = {}
    for row in series.rows:
        if abs(row.expected_db) < MOST_DB:
            depths.setdefault(row.depth, []).append(row.expected_db)
    plane = _plane("depth", max((row.depth for row in series.rows), default=1), "SQNR, dB", (bottom, high + 6))
    tips = _mark(plane, points)
    predicted = [sum(depths[depth]) / len(depths[depth]) for depth in sorted(depths)]
    plane.plot(sorted(depths), predicted, "--", color=COLOUR["muted"])
    return svg(plane, key, f"SQNR of each layer by depth, {series.profile}", description, tips)


def _plane(x_name: str, last: int, y_name: str, heights: tuple[float, float]) -> Axes:
    """Return axes from 0 to ``last``, a count."""
    plane, right = axes(_HEIGHT, left=58, right=14, top=34, bottom=48), max(1, last)
    plane.set(xlim=(-0.02 * right, right), ylim=heights, xlabel=x_name, title=y_name)
    plane.locator_params(axis="x", integer=True)
    plane.xaxis.set_major_formatter("{x:.0f}")
    plane.yaxis.set_major_formatter("{x:.3g}")
    return plane


def _mark(plane: Axes, points: Sequence[Point]) -> list[str]:
    """Draw ``points``; return what to say of each, in the order in which they were drawn."""
    tips = []
    for over, shape, colour in ((False, "o", "accent"), (True, "s", "bad")):
        chosen = [point for point in points if point[2] == over]
        plane.plot([x for x, *_ in chosen], [y for _, y, *_ in chosen], shape, color=COLOUR[colour], clip_on=False)
        tips += [tip for *_, tip in chosen]
    return tips


def sampled_points(badness: Sequence[float]) -> list[int]:
    """Choose the points to draw: all up to :data:`DOTS`; of more, the worst :data:`DOTS` ÷ 10 and the others evenly."""
    if len(badness) <= DOTS:
        return list(range(len(badness)))
    worst = set(sorted(range(len(badness)), key=lambda i: -badness[i])[: DOTS // 10])
    others = [i for i in range(len(badness)) if i not in worst]
    left = DOTS - len(worst)
    return sorted([*worst, *(others[i * len(others) // left] for i in range(left))])


def _statistic(name: str) -> str:
    """Name what a bound applies to: "relative_l2" to the mean, "relative_l2.p99" to that quantile."""
    return {"": "the mean", "worst": "the worst"}.get(name.partition(".")[2], name.partition(".")[2])
