"""The pictures of the report: sizes, drift by sample, SQNR by depth, and the range of each tensor's values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bf16kit.drift.measurements import MARGIN_DB, MOST_DB
from bf16kit.drift.verdicts import SampleSeries
from bf16kit.messages.text import size
from converter.report.exponentranges import HIGHEST, LOWEST, NORMAL, Span
from converter.report.figures import Sizes
from converter.report.layers import LayerSeries, layer_name, shortfall
from converter.report.svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Picture, Scale, axes, line, power_of_two, shortened

DOTS = 500  # in one picture; more cannot be told apart
_HEIGHT = 280.0
_LABELS = 50  # characters of a tensor's name together with its remark


def sizes_bars(sizes: Sizes) -> str:
    """Draw the bytes of the artifact beside those of its checkpoint."""
    bars = [
        ("fp32 checkpoint", sizes.checkpoint, "bar before"),
        ("bf16 weights and graphs", sizes.graphs_and_weights, "bar"),
    ]
    if sizes.residual:
        bars.append(("residual, which restores fp32", sizes.residual, "bar rest"))
    description = "; ".join(f"{name} {size(count)}" for name, count, _ in bars)
    picture = Picture("sizes", "Sizes", f"Bars: {description}.", 44.0 * len(bars) + 4)
    scale = Scale(0, max(1, *(count for _, count, _ in bars)), 0, WIDTH)
    for row, (name, count, kind) in enumerate(bars):
        y = 44.0 * row
        picture.add("text", name, class_="label", x=0, y=y + 14)
        picture.add("text", size(count), class_="label value", x=WIDTH, y=y + 14, text_anchor="end")
        picture.add("rect", class_="bar track", x=0, y=y + 20, width=WIDTH, height=12, rx=3)
        picture.add("rect", class_=kind, x=0, y=y + 20, width=max(2.0, scale(count)), height=12, rx=3)
    return picture.svg()


def sample_dots(series: SampleSeries, key: str) -> str:
    """Draw relative_l2 of each sample, with a line for each bound of the budget."""
    finite = [value for value in series.values if math.isfinite(value)]
    top = max([*finite, *(bound for _, bound in series.bounds), 1e-12]) * 1.08
    x = Scale(0, max(1, series.measured - 1), LEFT + 8, WIDTH - RIGHT)
    y = Scale(0, top, _HEIGHT - BOTTOM, TOP)
    limit = min((bound for name, bound in series.bounds if name == "relative_l2"), default=math.inf)
    shown = sampled_points([value if math.isfinite(value) else math.inf for value in series.values])
    above = sum(value > limit for value in series.values)
    picture = Picture(
        key,
        f"Drift of {series.output} by sample, {series.profile}",
        f"{len(shown)} of {series.measured} samples: relative_l2 from {min(series.values, default=0):.3g} to"
        f" {max(series.values, default=0):.3g}"
        + "".join(f"; the budget bounds {_statistic_name(name)} at {bound:.3g}" for name, bound in series.bounds)
        + (f"; {above} samples are above the line" if above else ""),
        _HEIGHT,
    )
    axes(picture, x, y, "sample", "relative_l2")
    for side, (name, bound) in enumerate(series.bounds):
        line(picture, [(x.start, y(bound)), (x.end, y(bound))], "budget")
        label, left = f"budget of {_statistic_name(name)}: {bound:.3g}", side % 2 == 1
        anchor, at = ("start", x.start + 4) if left else ("end", x.end)
        picture.add("text", label, class_="note budget", x=at, y=y(bound) - 6, text_anchor=anchor)
    for row in shown:
        value, sample = series.values[row], series.index(row)
        picture.dot(x(sample), y(value), "over" if value > limit else "", f"sample {sample}: {value:.3g}")
    return picture.svg()


def layer_dots(series: LayerSeries, key: str) -> str:
    """Draw the SQNR of each layer against its depth, with the line expected for rounding to bf16 alone."""
    values = [value for row in series.rows for value in (row.sqnr_db, row.expected_db)]
    finite = [value for value in values if abs(value) < MOST_DB] or [0.0]
    x = Scale(0, max(1, *(row.depth for row in series.rows)), LEFT + 8, WIDTH - RIGHT)
    low, high = min(finite), max(finite)
    y = Scale(min(0.0, low) if low < 12 else low - 6, high + 6, _HEIGHT - BOTTOM, TOP)
    drawn = [row for row in series.rows if row.sqnr_db < MOST_DB]
    exact = len(series.rows) - len(drawn)
    shown = sampled_points([shortfall(row) for row in drawn])
    off = series.first_off
    picture = Picture(
        key,
        f"SQNR of each layer by depth, {series.profile}",
        f"{len(shown)} of {series.measured} layers, in dB; {f'{exact} exact ones are left out; ' if exact else ''}"
        + (
            "all are on the line expected of rounding to bf16."
            if off is None
            else (
                f"the first below the expected line is {layer_name(off)}: {off.sqnr_db:.3g} dB, expected"
                f" {off.expected_db:.3g}."
            )
        ),
        _HEIGHT,
    )
    axes(picture, x, y, "depth", "SQNR, dB")
    for row in (drawn[i] for i in shown):
        kind = "over" if shortfall(row) > MARGIN_DB else ""
        description = f"{layer_name(row)} ({row.name}, {row.op}): {row.sqnr_db:.1f} dB, expected {row.expected_db:.1f}"
        picture.dot(x(row.depth), y(row.sqnr_db), kind, description)
    line(picture, _expected(series, x, y), "expected")
    return picture.svg()


def _expected(series: LayerSeries, x: Scale, y: Scale) -> list[tuple[float, float]]:
    """Return the points of the expected line: the mean of the expected SQNR at each depth."""
    depths: dict[int, list[float]] = {}
    for row in series.rows:
        if abs(row.expected_db) < MOST_DB:
            depths.setdefault(row.depth, []).append(row.expected_db)
    return [(x(depth), y(sum(found) / len(found))) for depth, found in sorted(depths.items())]


def span_bars(spans: Sequence[Span], measured: int, key: str) -> str:
    """Draw the exponents of the values of each of ``spans``, beside those that bf16 holds."""
    top, row_height = 6.0, 40.0
    bottom = top + row_height * len(spans)
    x = Scale(LOWEST - 17, HIGHEST + 6, 0, WIDTH)
    lossy = [span for span in spans if span.remark]
    description = "; ".join(f"{span.name}: {span.remark}" for span in lossy)
    picture = Picture(
        key,
        "Range of the values of bf16 tensors",
        f"{len(spans)} of {measured} tensors. "
        + (
            f"bf16 does not hold these at full precision: {description}."
            if description
            else ("bf16 holds all at full precision.")
        ),
        bottom + 26,
    )
    for exponent in (NORMAL, -64, 0, 64, HIGHEST):
        picture.add("line", class_="grid", x1=x(exponent), x2=x(exponent), y1=top, y2=bottom + 4)
        anchor = "end" if exponent == HIGHEST else "middle"
        picture.add("text", power_of_two(exponent), class_="tick", x=x(exponent), y=bottom + 20, text_anchor=anchor)
    for row, span in enumerate(spans):
        _span(picture, span, x, top + row_height * row)
    return picture.svg()


def _span(picture: Picture, span: Span, x: Scale, y: float) -> None:
    name = shortened(span.name, max(12, _LABELS - len(span.remark)))
    picture.add("text", name, class_="label halo", x=0, y=y + 14)
    if span.remark:
        picture.add("text", span.remark, class_="label bad halo", x=WIDTH, y=y + 14, text_anchor="end")
    picture.add("rect", class_="bar track", x=0, y=y + 20, width=WIDTH, height=10, rx=2)
    for start, end in ((x.low, NORMAL), (HIGHEST, x.high)):
        picture.add("rect", class_="zone", x=x(start), y=y + 20, width=x(end) - x(start), height=10)
    if span.low is not None and span.high is not None:
        start, end = x(span.low), x(span.high)
        kind = "span lossy" if span.remark else "span"
        picture.add("rect", class_=kind, x=start, y=y + 22, width=max(3.0, end - start), height=6, rx=2)


def sampled_points(badness: Sequence[float]) -> list[int]:
    """Choose the points to draw: all up to :data:`DOTS`; of more, the worst :data:`DOTS` ÷ 10 and the others evenly."""
    if len(badness) <= DOTS:
        return list(range(len(badness)))
    worst = set(sorted(range(len(badness)), key=lambda i: -badness[i])[: DOTS // 10])
    others = [i for i in range(len(badness)) if i not in worst]
    left = DOTS - len(worst)
    return sorted([*worst, *(others[i * len(others) // left] for i in range(left))])


def _statistic_name(name: str) -> str:
    """Name what a bound applies to: "relative_l2" to the mean, "relative_l2.p99" to that quantile."""
    return {"": "the mean", "worst": "the worst"}.get(name.partition(".")[2], name.partition(".")[2])
