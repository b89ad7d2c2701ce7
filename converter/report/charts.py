"""The charts of the report, drift by sample and SQNR by depth, and the drawing of SVG with matplotlib.

Colour alone never carries a meaning: what is over its bound is a square, predictions are dashed, every line is
labelled. A picture takes its colours from the CSS variables of the page around it, light or dark, and has a title and a
description for users who do not see it. The same figure gives the same bytes: no date, no random ids, and no settings
of the user's. Text stays text, escaped.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from bf16kit.converter.process.quiet import quiet
from bf16kit.converter.report.figures import LayerSeries, layer_name, shortfall
from bf16kit.drift.measurements import MARGIN_DB, MOST_DB, LayerEntry
from bf16kit.drift.verdicts import SampleSeries
from bf16kit.messages.wording import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOTS = 120  # in one chart: more are hard to tell apart, and would be most of the bytes of a page
WIDTH, HEIGHT = 480.0, 280.0  # of the report's pictures, in units of about a pixel; phones show them at two thirds
_MARGINS = (58, 14, 34, 48)  # left, right, top, bottom
# CSS variables. matplotlib draws with a colour that stands for the variable, and :func:`svg` puts the variable there.
_NAMES = ("text", "muted", "grid", "accent", "bad")
COLOUR = {name: f"#0000{number:02x}" for number, name in enumerate(_NAMES, start=1)}
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name may contain a dollar sign
    "font.size": 12,
    "text.color": COLOUR["text"],
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "axes.titley": 1.06,  # a place of its own: searching one takes as long as all else
    **dict.fromkeys(("axes.titlecolor", "axes.labelcolor", "axes.edgecolor"), COLOUR["muted"]),
    **dict.fromkeys(("xtick.color", "ytick.color"), COLOUR["muted"]),
    **dict.fromkeys(("axes.spines.left", "axes.spines.right", "axes.spines.top", "xtick.bottom", "ytick.left"), False),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": COLOUR["grid"],
    "grid.linewidth": 1,
    "lines.linewidth": 1.75,
    "lines.markersize": 6,
    "lines.markeredgewidth": 0,
}
# What matplotlib writes and a page does not need: line ends, ids that occur in every figure, its fonts, and a style for
# everything. The page's fonts are about as wide.
_NOISE = re.compile(
    r"\n\s*|(?<=<g) id=\"[^\"]*\"|font-family: [^;]*; |(?<=\") transform=\"rotate\(-0 [^)]*\)\"|<style.*?</style>", re.S
)
_COORDINATES = re.compile(r"(?<= [xyd]=\")[^\"]*")
_MARKERS = re.compile(r'<g>(<use [^>]*( style="[^"]*")/>(?:<use [^>]*\2/>)*)</g>')  # drawn alike, one after another


@contextmanager
def drawing() -> Iterator[None]:
    """Draw with this module's settings instead of the user's; also a decorator. What matplotlib logs is hidden."""
    with quiet():  # on first use it announces its cache of fonts, and it warns of characters that its own font lacks
        import matplotlib  # half a second, only spent when something is drawn

        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(_SETTINGS)
            yield


def svg(plane: Axes, key: str, title: str, description: str, tips: Iterable[str]) -> str:
    """Return the figure of ``plane`` as an SVG element, with ids that begin with ``key``.

    ``tips`` are shown when markers are pointed at, in the order in which they were drawn.
    """
    import matplotlib

    figure, stream = plane.get_figure(root=True), io.StringIO()
    assert figure is not None  # noqa: S101 - `axes` gave it one
    matplotlib.rcParams["svg.hashsalt"] = key
    unmarked = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(stream, format="svg", transparent=True, metadata=unmarked)
    text = re.split(r"<svg .*?>", _NOISE.sub("", stream.getvalue()), maxsplit=1)[1]
    for name, colour in COLOUR.items():
        text = text.replace(colour, f"var(--{name})")
    text = _COORDINATES.sub(lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), text)
    text = _MARKERS.sub(lambda found: f"<g{found[2]}>{found[1].replace(found[2], '')}</g>", text)
    titles = (f"<title>{_escaped(tip)}</title>" for tip in tips)
    text = re.sub(r"(<use [^>]*)/>", lambda marker: f"{marker[1]}>{next(titles, '')}</use>", text)
    width, height = (round(inches * 72) for inches in figure.get_size_inches())
    return (
        f'<svg class="plot" role="img" aria-labelledby="{key}-title {key}-desc" viewBox="0 0 {width} {height}"'
        f' xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'<title id="{key}-title">{_escaped(title)}</title><desc id="{key}-desc">{_escaped(description)}</desc>'
        f"{text}"
    )


def _escaped(text: str) -> str:
    return escape(printable(text, keep=""))


@drawing()
def samples_chart(series: SampleSeries, key: str) -> str:
    """Draw relative_l2 of each sample, with a line for each bound of the budget."""
    values = [math.inf if math.isnan(value) else value for value in series.values]
    top = max([*filter(math.isfinite, values), *(bound for _, bound in series.bounds), 1e-12]) * 1.08
    limit = dict(series.bounds).get("relative_l2", math.inf)
    shown = [(series.index(row), values[row]) for row in sampled_points(values)]
    description = (
        f"{len(shown)} of {series.measured} samples: relative_l2 from {min(values, default=0):.3g} to"
        f" {max(values, default=0):.3g}"
    )
    plane = _plane("sample", series.measured - 1, "relative_l2", (0, top))
    for side, (name, bound) in enumerate(series.bounds):
        of = name.partition(".")[2]
        statistic = {"": "the mean", "worst": "the worst"}.get(of, of)
        description += f"; the budget bounds {statistic} at {bound:.3g}"
        plane.axhline(bound, color=COLOUR["bad"])
        label: dict[str, Any] = {"x": 0.0, "ha": "left"} if side % 2 else {"x": 1.0, "ha": "right"}
        label |= {"y": bound, "va": "bottom", "color": COLOUR["bad"], "transform": plane.get_yaxis_transform()}
        plane.text(s=f"budget of {statistic}: {bound:.3g}", **label)
    if over := sum(value > limit for value in values):
        description += f"; {over} samples are above the line"
    tips = _mark(plane, [(at, min(value, top), value > limit, f"sample {at}: {value:.3g}") for at, value in shown])
    return svg(plane, key, f"Drift of {series.output} by sample, {series.profile}", description, tips)


@drawing()
def layers_chart(series: LayerSeries, key: str) -> str:
    """Draw the SQNR of each layer against its depth, with the SQNR predicted for rounding to bf16 alone."""
    values = [value for row in series.rows for value in (row.sqnr_db, row.expected_db)]
    finite = [value for value in values if abs(value) < MOST_DB] or [0.0]
    low, high = min(finite), max(finite)
    bottom = min(0.0, low) if low < 12 else low - 6
    inexact = [row for row in series.rows if row.sqnr_db < MOST_DB]
    drawn = [inexact[place] for place in sampled_points([shortfall(row) for row in inexact])]
    description, exact = f"{len(drawn)} of {series.measured} layers, in dB; ", len(series.rows) - len(inexact)
    if exact:
        description += f"{exact} exact ones are left out; "
    if (off := series.first_off) is None:
        description += "none is below the SQNR predicted for rounding to bf16."
    else:
        description += f"the first below its predicted SQNR is {_layer_text(off)}."
    depths: dict[int, list[float]] = {}
    for row in series.rows:
        if abs(row.expected_db) < MOST_DB:
            depths.setdefault(row.depth, []).append(row.expected_db)
    plane = _plane("depth", max((row.depth for row in series.rows), default=1), "SQNR, dB", (bottom, high + 6))
    points = [(row.depth, max(row.sqnr_db, bottom), shortfall(row) > MARGIN_DB, _layer_text(row)) for row in drawn]
    tips = _mark(plane, points)
    predicted = [sum(depths[depth]) / len(depths[depth]) for depth in sorted(depths)]
    plane.plot(sorted(depths), predicted, "--", color=COLOUR["muted"])
    return svg(plane, key, f"SQNR of each layer by depth, {series.profile}", description, tips)


def _layer_text(row: LayerEntry) -> str:
    return f"{layer_name(row)} ({row.name}, {row.op}): {row.sqnr_db:.1f} dB, predicted {row.expected_db:.1f}"


def _plane(x_name: str, last: int, y_name: str, heights: tuple[float, float]) -> Axes:
    """Return axes from 0 to ``last``, a count."""
    from matplotlib.figure import Figure

    left, right, top, bottom = _MARGINS
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))  # SVG has 72 units an inch
    area = (left / WIDTH, bottom / HEIGHT, 1 - (left + right) / WIDTH, 1 - (top + bottom) / HEIGHT)
    plane, end = figure.add_axes(area), max(1, last)
    plane.set(xlim=(-0.02 * end, end), ylim=heights, xlabel=x_name, title=y_name)
    plane.locator_params(axis="x", integer=True)
    plane.xaxis.set_major_formatter("{x:.0f}")
    plane.yaxis.set_major_formatter("{x:.3g}")
    return plane


def _mark(plane: Axes, points: Sequence[tuple[float, float, bool, str]]) -> list[str]:
    """Draw points (x, y, whether over its bound, what to say of it); return what to say of each, in drawing order."""
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
