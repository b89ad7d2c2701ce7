"""The commands of ``docs/converting.md``, as a reader copies them from the page."""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bf16kit.artifact.artifact import Artifact
from bf16kit.runtime.loading import load, load_reference

DOCS = Path(__file__).parents[2] / "docs"
OUT = ("--out", "REPOSITORY/MODEL/1")  # as the head of the page's first table specifies
PACKAGE = "pkg"  # the package in the table's --model
Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Answers:
    """Inputs, and the outputs that the source's own framework computes for them, each by name."""

    inputs: Arrays
    outputs: Arrays


Maker = Callable[[Path], Answers]  # writes the files that a row's command names into a directory


def rows() -> dict[str, str]:
    """Return the table of sources: its first column → the first code span of its second column, the command."""
    page = (DOCS / "converting.md").read_text("utf-8")
    (table,) = re.findall(r"^\| source \| command, .*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    found = {}
    for line in table.splitlines():
        source, command = (cell.strip() for cell in line.strip("|").split(" | ")[:2])
        (found[source], *_) = re.findall(r"`([^`]+)`", command)
    return found


def command(source: str) -> list[str]:
    """Return the whole command of a row, without the name of the program."""
    return ["checkpoint", *shlex.split(rows()[source]), *OUT]


def row(beginning: str) -> str:
    """Return the only source in the table that begins with ``beginning``."""
    (found,) = (source for source in rows() if source.startswith(beginning))
    return found


def write_package(directory: Path, **modules: str) -> None:
    """Write a package ``pkg`` into ``directory``; ``modules`` are the texts of its modules by name."""
    (directory / PACKAGE).mkdir()
    for name, text in {"__init__": "", **modules}.items():
        (directory / PACKAGE / f"{name}.py").write_text(text)


def assert_answers(artifact: Artifact, expected: Answers) -> None:
    """Assert that the reference's outputs equal the source's to 1e-5, and the cpu profile's within the default budget.

    Both bounds are for the L2 norm of the difference, relative to the norm of the source's output.
    """
    for runtime, bound in ((load_reference(artifact), 1e-5), (load(artifact, "cpu"), 1.5e-2)):
        try:
            found = runtime.run(dict(expected.inputs))
        finally:
            runtime.close()
        assert set(found) == set(expected.outputs)
        for name, output in expected.outputs.items():
            assert np.linalg.norm(found[name] - output) < bound * np.linalg.norm(output), (bound, name)
