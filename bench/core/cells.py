"""How the pages write what was measured: cells and rows of Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import Any

WIDTH = 120


def lines(text: str, indent: str = "") -> str:
    """``text`` in lines that are not too long, the further ones indented."""
    return fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def row(label: str, one: Mapping[str, Any] | None) -> str:
    """A measurement with its interval, its goal and its verdict."""
    if one is None or "absent" in one:
        return f"| {label} | – | {goal(one or {})} | not measured{': ' + one['absent'] if one else ''} |"
    verdict = one.get("verdict", "")
    return f"| {label} | {value(one)} | {goal(one)} | {f'**{verdict}**' if verdict not in ('', 'met') else verdict} |"


def goal(one: Mapping[str, Any]) -> str:
    """What a measurement is held to; empty where it is held to nothing."""
    return f"≥ {one['at_least']:g}" if "at_least" in one else f"≤ {one['at_most']:g}" if "at_most" in one else ""


def value(one: Mapping[str, Any]) -> str:
    """With its interval."""
    return alone(one) + (f" [{', '.join(map(_number, one['interval']))}]" if "interval" in one else "")


def alone(one: Mapping[str, Any]) -> str:
    """The value without its interval."""
    return f"{_number(one['value'])} {one['unit']}".rstrip()


def _number(number: float | None) -> str:
    return "–" if number is None else f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
