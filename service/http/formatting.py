"""Formats numbers for people: three digits and a fitting unit."""

from __future__ import annotations

NONE = "–"
_SPACE = "\u00a0"  # between a number and its unit, to prevent a line break


def number(value: float | None) -> str:
    """``1234567`` → ``1.23 M``; ``0.0012`` → ``0.0012``."""
    if value is None:
        return NONE
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.3g}{_SPACE}{unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """``0.0021`` → ``2.1 ms``."""
    if value is None:
        return NONE
    size, unit = (1.0, "s") if value >= 1 or value == 0 else (1e-3, "ms") if value >= 1e-3 else (1e-6, "µs")
    return f"{number(value / size)}{_SPACE}{unit}"


def share(value: float | None) -> str:
    """``0.137`` → ``14 %``; from 10 on as a multiple."""
    if value is None:
        return NONE
    if value >= 10:
        return f"{number(value)}{_SPACE}×"
    return f"{100 * value:.2g}{_SPACE}%" if value < 0.1 else f"{100 * value:.0f}{_SPACE}%"


def size(value: int) -> str:
    """Format bytes as kB or MB, in powers of 1000."""
    return f"{value / 1e6:.1f}{_SPACE}MB" if value >= 1e5 else f"{value / 1e3:.1f}{_SPACE}kB"


def duration(value: float) -> str:
    """``93784`` → ``1 d 2 h``."""
    total = int(value)
    parts = (total // 86400, "d"), (total // 3600 % 24, "h"), (total // 60 % 60, "min"), (total % 60, "s")
    first = next((at for at, (amount, _) in enumerate(parts) if amount), len(parts) - 1)
    return " ".join(f"{amount}{_SPACE}{unit}" for amount, unit in parts[first : first + 2] if amount or first == 3)


def plural(amount: int, noun: str) -> str:
    """``1 model``, ``2 models``."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"
