"""The doctor's findings, as text for the user and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bf16kit.messages.text import table
from converter.doctor.abilities import FORMATS, OTHERS, SOURCES, Capability, capabilities
from converter.doctor.parts import Part, parts


def record() -> dict[str, Any]:
    """Return everything as docs/json.md describes it."""
    found = parts()
    return {
        "version": 1,
        "installed": [{"name": part.name, "found": part.found, "remedy": part.remedy} for part in found.values()],
        "sources": [_entry(ability) for ability in capabilities(SOURCES, found)],
        "formats": [_entry(ability) for ability in capabilities(FORMATS, found)],
        "others": [_entry(ability) for ability in capabilities(OTHERS, found)],
    }


def describe() -> str:
    """Return tables of what is installed, read and written, and the commands that install what is missing."""
    found = parts()
    sources, formats, others = (capabilities(needs, found) for needs in (SOURCES, FORMATS, OTHERS))
    sections = [
        table("Installed", ("part", "found"), [(part.name, part.found or "missing") for part in found.values()]),
        table("Sources that can be converted now", ("source", "now"), _rows(sources)),
        table("Formats that can be written now", ("format", "now"), _rows(formats)),
        table("Other things that can be done now", ("what", "now"), _rows(others)),
        *_remedies(found.values()),
    ]
    return "\n\n".join(sections)


def _entry(ability: Capability) -> dict[str, Any]:
    return {"name": ability.name, "possible": ability.possible, "missing": list(ability.missing)}


def _rows(found: Sequence[Capability]) -> list[tuple[str, str]]:
    return [
        (capability.name, "yes" if capability.possible else f"no: needs {', '.join(capability.missing)}")
        for capability in found
    ]


def _remedies(found: Any) -> Iterator[str]:
    missing: list[Part] = [part for part in found if not part.found]
    if not missing:
        yield "Nothing is missing."
        return
    lines = ["To install the missing parts"]
    for part in missing:
        lines += [f"  {part.name}:", *(f"    {line}" for line in part.remedy.splitlines())]
    yield "\n".join(lines)
