"""The commands of ``docs/converting.md``, as a reader would copy them from the page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bf16kit.artifact import Artifact
from bf16kit.runtime.loading import load, load_reference

DOCS = Path(__file__).parents[2] / "docs"
OUT = ("--out", "REPOSITORY/MODEL/1")  # as the head of the page's first table says
PACKAGE = "pkg"  # of the table's --model
Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Answers:
    """What the source's own framework gives: inputs, and the outputs to them, each by its name."""

    inputs: Arrays
    outputs: Arrays


Maker = Callable[[Path], Answers]  # writes the files that a row's command names into a directory


def rows() -> dict[str, str]:
    """The table of sources: its first column, and the command in its second, as far as a code span has it."""
    page = (DOCS / "converting.md").read_text("utf-8")
    (table,) = re.findall(r"^\| source \| command, .*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    found = {}
    for line in table.splitlines():
        source, command = (cell.strip() for cell in line.strip("|").split(" | ")[:2])
        (found[source], *_) = re.findall(r"`([^`]+)`", command)
    return found


def command(source: str) -> list[str]:
    """The whole command of a row, without the name of the program."""
    return ["checkpoint", *shlex.split(rows()[source]), *OUT]


def row(beginning: str) -> str:
    """The one source of the table that begins so."""
    (found,) = (source for source in rows() if source.startswith(beginning))
    return found


def write_package(directory: Path, **modules: str) -> None:
    """A package ``pkg`` in ``directory``, its modules by their text."""
    (directory / PACKAGE).mkdir()
    for name, text in {"__init__": "", **modules}.items():
        (directory / PACKAGE / f"{name}.py").write_text(text)


def assert_answers(artifact: Artifact, expected: Answers) -> None:
    """The reference answers as the source does in fp32, and the ``cpu`` profile within the default budget."""
    for runtime, bound in ((load_reference(artifact), 1e-5), (load(artifact, "cpu"), 1.5e-2)):
        try:
            found = runtime.run(dict(expected.inputs))
        finally:
            runtime.close()
        assert set(found) == set(expected.outputs)
        for name, output in expected.outputs.items():
            assert np.linalg.norm(found[name] - output) < bound * np.linalg.norm(output), (bound, name)
