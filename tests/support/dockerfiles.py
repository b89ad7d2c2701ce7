"""Parses a Dockerfile into the instructions of each stage. It knows only the grammar that this repository uses."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PIN = re.compile(r"([A-Za-z0-9._-]+)==([^\s;,*]+)")


class Instruction(NamedTuple):
    """``keyword``, in capitals, and the rest of its lines joined into one."""

    keyword: str
    rest: str

    @property
    def words(self) -> list[str] | None:
        """The words of the exec form (JSON after any flags); None for the shell form."""
        found = re.search(r"\[.*\]$", self.rest)
        return json.loads(found[0]) if found else None


class Stage(NamedTuple):
    """A FROM and the instructions that follow it."""

    base: str
    name: str
    instructions: list[Instruction]

    def all(self, keyword: str) -> list[Instruction]:
        return [instruction for instruction in self.instructions if instruction.keyword == keyword]


class Dockerfile:
    """The stages by name."""

    def __init__(self, path: Path) -> None:
        """Raises AssertionError for a line that is not an instruction."""
        self.stages: dict[str, Stage] = {}
        current: list[Instruction] = []  # those before the first stage are only arguments
        for text in _logical(path.read_text("utf-8")):
            keyword, _, rest = text.partition(" ")
            assert re.fullmatch(r"[A-Z]+", keyword), f"no instruction: {text}"
            if keyword == "FROM":
                base, _, name = rest.partition(" AS ")
                current = []
                self.stages[name] = Stage(base, name, current)
            else:
                current.append(Instruction(keyword, rest))

    def line(self, name: str) -> list[Stage]:
        """Return the stage ``name``, the stage of this file that it builds on, and so on."""
        found = [self.stages[name]]
        while found[-1].base in self.stages:
            found.append(self.stages[found[-1].base])
        return found

    def last(self, name: str, keyword: str) -> Instruction:
        """Return the ``keyword`` instruction that takes effect in the image of the stage ``name``."""
        return next(stage.all(keyword)[-1] for stage in self.line(name) if stage.all(keyword))


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
