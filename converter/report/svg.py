"""Draws SVG as text: axes, dots, lines and bars whose colours come from the page's style sheet.

Everything is escaped. A picture has a title and a description for users who do not see it. Colour alone never carries a
meaning: over-budget dots are squares, expected lines are dashed, and every line is labelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from bf16kit.messages.text import printable

WIDTH = 480.0  # width of every picture, in units of about a pixel; phones show it at two thirds
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 34.0, 48.0


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps ``low`` … ``high`` to ``start`` … ``end``; values beyond are put on the nearer end."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        if self.high <= self.low:
            return self.start
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


@dataclass(slots=True)
class Picture:
    """A picture being drawn, ``height`` units high; ``key`` is unique on the page, for title and description."""

    key: str
    title: str
    description: str
    height: float
    parts: list[str] = field(default_factory=list)

    def add(self, tag: str, text: str | None = None, **attributes: object) -> None:
        """Add an element. Attributes keep their order; ``class_`` becomes ``class``, and underscores become hyphens."""
        named = " ".join(
            f'{name.rstrip("_").replace("_", "-")}="{_attribute(value)}"' for name, value in attributes.items()
        )
        self.parts.append(f"<{tag} {named}/>" if text is None else f"<{tag} {named}>{escaped(text)}</{tag}>")

    def dot(self, x: float, y: float, kind: str, title: str) -> None:
        """Add a point whose title shows when it is pointed at: a square if its ``kind`` is "over", else a circle."""
        shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"' if kind != "over" else _square(x, y)
        self.parts.append(f'{shape} class="dot {kind}"><title>{escaped(title)}</title></{shape[1:].split()[0]}>')

    def svg(self) -> str:
        """Return the SVG element."""
        key = escape(self.key)
        return (
            f'<svg class="plot" role="img" aria-labelledby="{key}-title {key}-desc"'
            f' viewBox="0 0 {WIDTH:g} {self.height:g}">'
            f'<title id="{key}-title">{escaped(self.title)}</title>'
            f'<desc id="{key}-desc">{escaped(self.description)}</desc>{"".join(self.parts)}</svg>'
        )


def axes(picture: Picture, x: Scale, y: Scale, x_name: str, y_name: str, x_integers: bool = True) -> None:
    """Draw both axes of ``picture`` with ticks, horizontal grid lines and names."""
    bottom = y.start
    for value in ticks(y.low, y.high):
        at = y(value)
        picture.add("line", class_="grid", x1=x.start, x2=x.end, y1=at, y2=at)
        picture.add("text", number(value), class_="tick", x=x.start - 6, y=at + 4, text_anchor="end")
    for value in ticks(x.low, x.high, integers=x_integers):
        picture.add("text", number(value), class_="tick", x=x(value), y=bottom + 18, text_anchor="middle")
        picture.add("line", class_="axis", x1=x(value), x2=x(value), y1=bottom, y2=bottom + 4)
    picture.add("line", class_="axis", x1=x.start, x2=x.end, y1=bottom, y2=bottom)
    picture.add("text", x_name, class_="name", x=(x.start + x.end) / 2, y=picture.height - 6, text_anchor="middle")
    picture.add("text", y_name, class_="name", x=0, y=16)


def line(picture: Picture, points: Sequence[tuple[float, float]], kind: str) -> None:
    """Draw a line through ``points``."""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    picture.add("path", d=path, class_=f"line {kind}")


def ticks(low: float, high: float, count: int = 5, integers: bool = False) -> Iterator[float]:
    """Yield about ``count`` round numbers from ``low`` to ``high``, at most."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        yield low
        return
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    if integers:
        step = max(1.0, step)
    for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        yield i * step


def number(value: float) -> str:
    """Format a tick's label."""
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e5 else f"{value:.3g}"


def power_of_two(exponent: int) -> str:
    """Format ``2⁻¹²⁶``."""
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def shortened(name: str, max_length: int) -> str:
    """Shorten ``name`` in the middle if it is longer than ``max_length``: names of layers differ at both ends."""
    if len(name) <= max_length:
        return name
    head = (max_length - 1) // 2
    return f"{name[:head]}…{name[len(name) - (max_length - 1 - head) :]}"


def escaped(text: str) -> str:
    """Escape text, so that a browser shows it and never interprets it."""
    return escape(printable(text, keep=""))


def _square(x: float, y: float) -> str:
    return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"'


def _attribute(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else escaped(str(value))
