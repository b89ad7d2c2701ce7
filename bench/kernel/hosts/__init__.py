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
Run = Callable[[], Any]  # gives the outputs; of the limit, the seconds that the work takes at least
Prepare = Callable[[Feeds, float], Run]  # from the inputs, and the arithmetic operations that a run has to do


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
