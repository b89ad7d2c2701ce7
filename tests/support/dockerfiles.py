"""Parses a Dockerfile into the instructions of each stage. It knows only the grammar that this repository uses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_PIN = re.compile(r"([A-Za-z0-9._-]+)==([^\s;,*]+)")
_STAGE = re.compile(r"(?P<base>\S+)(?:\s+AS\s+(?P<name>\S+))?", re.IGNORECASE)


@dataclass(frozen=True)
class Instruction:
    """``keyword``, in capitals, and the rest of its lines joined into one."""

    keyword: str
    rest: str

    @property
    def words(self) -> list[str] | None:
        """The words of the exec form (JSON after any flags); None for the shell form."""
        found = re.search(r"\[.*\]$", self.rest)
        return json.loads(found[0]) if found else None


@dataclass
class Stage:
    """A FROM and the instructions that follow it."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, keyword: str) -> list[Instruction]:
        return [instruction for instruction in self.instructions if instruction.keyword == keyword]


@dataclass
class Dockerfile:
    """The stages by name; ``arguments`` are the instructions before the first stage."""

    stages: dict[str, Stage]
    arguments: list[Instruction]

    def line(self, name: str) -> list[Stage]:
        """Return the stage ``name``, the stage of this file that it builds on, and so on."""
        found = [self.stages[name]]
        while found[-1].base in self.stages:
            found.append(self.stages[found[-1].base])
        return found

    def last(self, name: str, keyword: str) -> Instruction:
        """Return the ``keyword`` instruction that takes effect in the image of the stage ``name``."""
        return next(stage.all(keyword)[-1] for stage in self.line(name) if stage.all(keyword))

    def labels(self, name: str) -> dict[str, str]:
        """Return the labels of the image of the stage ``name``; arguments in them are not replaced."""
        found: dict[str, str] = {}
        for stage in reversed(self.line(name)):
            for label in stage.all("LABEL"):
                found |= dict(re.findall(r'(\S+?)="([^"]*)"', label.rest))
        return found


def read(path: Path) -> Dockerfile:
    """Parse the Dockerfile at ``path``. Raises AssertionError for a line that is not an instruction."""
    stages: dict[str, Stage] = {}
    arguments: list[Instruction] = []
    current: Stage | None = None
    for text in _logical(path.read_text("utf-8")):
        keyword, _, rest = text.partition(" ")
        assert re.fullmatch(r"[A-Z]+", keyword), f"no instruction: {text}"
        if keyword == "FROM":
            found = _STAGE.fullmatch(rest)
            assert found, text
            current = Stage(found["base"], found["name"] or "")
            stages[current.name] = current
        elif current is None:
            arguments.append(Instruction(keyword, rest))
        else:
            current.instructions.append(Instruction(keyword, rest))
    return Dockerfile(stages, arguments)


def _logical(text: str) -> Iterator[str]:
    """Yield lines without comments, joined where they end in a backslash. Comments may be between joined lines."""
    held = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#") or not line.strip():
            continue
        held += " " + line.strip().removesuffix("\\").strip()
        if not line.rstrip().endswith("\\"):
            yield held.strip()
            held = ""
    assert not held, f"the file ends within {held}"


def pins(path: Path) -> dict[str, str]:
    """Return versions by name, normalised as pip compares names. Every line must be NAME==VERSION."""
    lines = [line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines()]
    found = {}
    for line in filter(None, lines):
        name, version = _PIN.fullmatch(line).groups()  # type: ignore[union-attr]
        found[re.sub(r"[-_.]+", "-", name).lower()] = version
    return found
