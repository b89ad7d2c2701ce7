"""Draws with matplotlib, as SVG that takes its colours from the CSS variables of the page around it, light or dark.

The same figure gives the same bytes: no date, no random ids, and no settings of the user's. Text stays text, escaped. A
picture has a title and a description for users who do not see it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from bf16kit.messages.wording import printable
from converter.process.quiet import quiet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 480.0  # width of the report's pictures, in units of about a pixel; phones show it at two thirds
# CSS variables. matplotlib draws with a colour that stands for the variable, and :func:`svg` puts the variable there.
_NAMES = ("text", "muted", "grid", "accent", "bad", "zone", "second", "third", "target")
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


@contextmanager
def drawing() -> Iterator[None]:
    """Draw with this module's settings instead of the user's; also a decorator. What matplotlib logs is hidden."""
    with quiet():  # on first use it announces its cache of fonts, and it warns of characters that its own font lacks
        import matplotlib  # half a second, only spent when something is drawn

        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(_SETTINGS)
            yield


def axes(
    height: float, width: float = WIDTH, *, left: float = 0, right: float = 0, top: float = 0, bottom: float = 0
) -> Axes:
    """Return the axes of a new figure, with margins in the figure's units; call it inside :func:`drawing`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72))  # SVG has 72 units an inch
    area = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    return figure.add_axes(area)


def svg(plane: Axes, key: str, title: str, description: str, tips: Iterable[str] = (), style: str = "") -> str:
    """Return the figure of ``plane`` as an SVG element, with ids that begin with ``key``.

    ``tips`` are shown when markers are pointed at, in the order in which they were drawn. ``style`` is CSS for a file
    of its own, which has no page around it and needs a size.
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
    titles = (_element("title", tip) for tip in tips)
    text = re.sub(r"(<use [^>]*)/>", lambda marker: f"{marker[1]}>{next(titles, '')}</use>", text)
    width, height = (round(inches * 72) for inches in figure.get_size_inches())
    size = f' width="{width}" height="{height}"' if style else ""
    return (
        f'<svg class="plot" role="img" aria-labelledby="{key}-title {key}-desc" viewBox="0 0 {width} {height}"{size}'
        f' xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f"{_element('title', title, f'{key}-title')}{_element('desc', description, f'{key}-desc')}{style}{text}"
    )


def _element(tag: str, text: str, name: str = "") -> str:
    identity = f' id="{name}"' if name else ""
    return f"<{tag}{identity}>{escape(printable(text, keep=''))}</{tag}>"
