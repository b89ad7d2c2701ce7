"""The programs that are compared, each opened by a module of its own that nothing else imports.

Every module has ``open_side(options, subject)``, which gives what prepares a run for given inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

Feeds = Mapping[str, NDArray[Any]]


class Absent(Exception):
    """Why a side takes no part here."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, as each side is given it: our artifact, fp32 in one ONNX file, the same with matrices stored in bf16."""

    name: str
    artifact: Path
    graph: Path
    stored: Path

    def as_dict(self) -> dict[str, str]:
        return {key: str(value) for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, str]) -> Subject:
        return cls(content["name"], *(Path(content[key]) for key in ("artifact", "graph", "stored")))


@dataclass(frozen=True, slots=True)
class Work:
    """What a run has to do at least: arithmetic operations, and bytes of weights that it reads."""

    operations: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """``run`` runs once and gives the outputs; of a limit it gives seconds, and ``measures`` itself."""

    run: Callable[[], Any]
    measures: bool = False


Prepare = Callable[[Feeds, Work], Prepared]
