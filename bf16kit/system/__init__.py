"""The system under a process: memory, control groups, parents; and the comparison of package versions."""

from __future__ import annotations

import re


def version_key(version: str) -> tuple[int, ...]:
    """Return ``1.31.1`` as (1, 31, 1); the suffix of a pre-release is ignored."""
    return tuple(int(digits[0]) if (digits := re.match(r"\d+", part)) else 0 for part in version.split("."))


def is_older(version: str, other: str) -> bool:
    """Return whether ``version`` is older than ``other``; 1.24 is older than 1.24.1."""
    return version_key(version) < version_key(other)
