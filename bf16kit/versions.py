"""Versions of packages, compared."""

from __future__ import annotations

import re


def order(version: str) -> tuple[int, ...]:
    """``1.31.1`` as (1, 31, 1); what a pre-release adds to its number counts for nothing."""
    return tuple(int(digits[0]) if (digits := re.match(r"\d+", part)) else 0 for part in version.split("."))


def is_older(version: str, other: str) -> bool:
    """Whether ``version`` came before ``other``; 1.24 before 1.24.1."""
    return order(version) < order(other)
