"""The versions that a file of constraints names."""

import re
from pathlib import Path

_PIN = re.compile(r"([A-Za-z0-9._-]+)==([^\s;,*]+)")


def pins(path: Path) -> dict[str, str]:
    """Return versions by name, normalised as pip compares names. Every line must be NAME==VERSION."""
    lines = [line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines()]
    found = {}
    for line in filter(None, lines):
        name, version = _PIN.fullmatch(line).groups()  # type: ignore[union-attr]
        found[re.sub(r"[-_.]+", "-", name).lower()] = version
    return found
