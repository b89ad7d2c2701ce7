"""The charts of the report: sizes, drift by sample, SQNR by depth, and the range of each tensor's values.

Colour alone never carries a meaning: what is over its bound is a square, predictions are dashed, every line is
labelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bf16kit.drift.measurements import MARGIN_DB, MOST_DB
from bf16kit.drift.verdicts import SampleSeries
from bf16kit.messages.wording import printable, size
from converter.report.figures import HIGHEST, LOWEST, NORMAL, Sizes, Span
from converter.report.layers import LayerSeries, layer_name, shortfall
from converter.report.svg import COLOUR, WIDTH, axes, drawing, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOTS = 500  # in one chart; more cannot be told apart
_HEIGHT = 280.0
_LABELS = 50  # characters of a tensor's name together with its remark
Point = tuple[float, float, bool, str]  # x, y, whether it is over its bound, what to say of it


@drawing()
def sizes_chart(sizes: Sizes, key: str = "sizes") -> str:
    """Draw the bytes of the artifact beside those of its checkpoint."""
    bars = [
        ("fp32 checkpoint", sizes.checkpoint, "before"),
        ("bf16 weights and graphs", sizes.graphs_and_weights, "accent"),
    ]
    if sizes.residual:
        bars.append(("residual, which restores fp32", sizes.residual, "accent-soft"))
    height, longest = 44.0 * len(bars) + 4, max(1, *(count for _, count, _ in bars))
    plane = axes(height)
    plane.set(xlim=(0, WIDTH), ylim=(height, 0))
    plane.axis("off")
    for row, (name, count, colour) in enumerate(bars):
        y = 44.0 * row
        plane.text(0, y + 14, name)
        plane.text(WIDTH, y + 14, size(count), ha="right", weight="bold")
        plane.barh(y + 26, WIDTH, 12, color=COLOUR["grid"])
        plane.barh(y + 26, max(2.0, WIDTH * count / longest), 12, color=COLOUR[colour])
    return svg(plane, key, "Sizes", f"Bars: {'; '.join(f'{name} {size(count)}' for name, count, _ in bars)}.")


@drawing()
def samples_chart(series: SampleSeries, key: str) -> str:
    """Draw relative_l2 of each sample, with a line for each bound of the budget."""
    values = [math.inf if math.isnan(value) else value for value in series.values]
    top = max([*filter(math.isfinite, values), *(bound for _, bound in series.bounds), 1e-12]) * 1.08
    limit = min((bound for name, bound in series.bounds if name == "relative_l2"), default=math.inf)
    shown = sampled_points(values)
    over = sum(value > limit for value in values)
    points = [
        (
            series.index(row),
            min(values[row], top),
            values[row] > limit,
            f"sample {series.index(row)}: {values[row]:.3g}",
        )
        for row in shown
    ]
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


@drawing()
def ranges_chart(spans: Sequence[Span], measured: int, key: str) -> str:
    """Draw the exponents of the values of each of ``spans``, beside those that bf16 holds."""
    row_height, top = 40.0, 6.0
    bottom = top + row_height * len(spans)
    low, high = LOWEST - 17, HIGHEST + 6
    plane = axes(bottom + 26)
    plane.set(xlim=(low, high), ylim=(bottom + 26, 0))
    plane.axis("off")
    ticks = (NORMAL, -64, 0, 64, HIGHEST)
    plane.vlines(ticks, top, bottom + 4, color=COLOUR["grid"], linewidth=1, zorder=0)
    for exponent in ticks:
        anchor = "right" if exponent == HIGHEST else "center"
        plane.text(exponent, bottom + 20, power_of_two(exponent), ha=anchor, color=COLOUR["muted"])
    for row, span in enumerate(spans):
        y, colour = top + row_height * row, COLOUR["bad" if span.remark else "accent"]
        plane.text(low, y + 14, shortened(printable(span.name, keep=""), max(12, _LABELS - len(span.remark))))
        plane.text(high, y + 14, span.remark, ha="right", color=COLOUR["bad"])
        plane.barh(y + 25, high - low, 10, left=low, color=COLOUR["grid"])
        for start, end in ((low, NORMAL), (HIGHEST, high)):
            plane.barh(y + 25, end - start, 10, left=start, color=COLOUR["zone"])
        if span.low is not None and span.high is not None:
            plane.barh(y + 25, max(2.0, span.high - span.low), 6, left=span.low, color=colour)
    lossy = "; ".join(f"{span.name}: {span.remark}" for span in spans if span.remark)
    held = f"bf16 does not hold these at full precision: {lossy}." if lossy else "bf16 holds all at full precision."
    return svg(plane, key, "Range of the values of bf16 tensors", f"{len(spans)} of {measured} tensors. {held}")


def sampled_points(badness: Sequence[float]) -> list[int]:
    """Choose the points to draw: all up to :data:`DOTS`; of more, the worst :data:`DOTS` ÷ 10 and the others evenly."""
    if len(badness) <= DOTS:
        return list(range(len(badness)))
    worst = set(sorted(range(len(badness)), key=lambda i: -badness[i])[: DOTS // 10])
    others = [i for i in range(len(badness)) if i not in worst]
    left = DOTS - len(worst)
    return sorted([*worst, *(others[i * len(others) // left] for i in range(left))])


def power_of_two(exponent: int) -> str:
    """Format ``2⁻¹²⁶``."""
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def shortened(name: str, max_length: int) -> str:
    """Shorten ``name`` in the middle if it is longer than ``max_length``: names of layers differ at both ends."""
    head = (max_length - 1) // 2
    return name if len(name) <= max_length else f"{name[:head]}…{name[len(name) - (max_length - 1 - head) :]}"


def _statistic(name: str) -> str:
    """Name what a bound applies to: "relative_l2" to the mean, "relative_l2.p99" to that quantile."""
    return {"": "the mean", "worst": "the worst"}.get(name.partition(".")[2], name.partition(".")[2])
