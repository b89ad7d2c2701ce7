"""The processes of :mod:`bench.kernel.worker`, seen from the benchmark: one for each group of sides, all fresh."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.core.child import Child, module
from bench.core.models import ROOT
from bench.kernel.hosts import Subject
from bench.kernel.sides import Side


class Workers(ExitStack):
    """A process per group of ``sides``, each side on its own copy of the model. ``absent`` says who takes no part."""

    def __init__(self, sides: Sequence[Side], subjects: Mapping[str, Subject], log: Path, caches: Path) -> None:
        super().__init__()
        self.absent: dict[str, str] = {}
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TORCHINDUCTOR_CACHE_DIR": str(caches),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compilers are then children, whose time counts as ours
        }
        started: dict[str, Child] = {}
        for process in dict.fromkeys(side.process for side in sides):
            child = Child(module("bench.kernel.worker"), environment=environment, log=log)
            started[process] = self.enter_context(child)
        self._children = {side.name: started[side.process] for side in sides}
        self.ask_all({side.name: {"do": "open", "subject": subjects[side.name].as_dict()} for side in sides})

    @property
    def present(self) -> list[str]:
        """Who takes part."""
        return [name for name in self._children if name not in self.absent]

    def ask(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """What the side ``name`` answers; one that fails is absent from then on."""
        return self.ask_all({name: request})[name]

    def ask_all(self, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The same for several at once, which then work at the same time."""
        for name, request in requests.items():
            self._children[name].send({**request, "side": name})
        answers = {name: self._children[name].answer() for name in requests}
        self.absent |= {name: answer["absent"] for name, answer in answers.items() if "absent" in answer}
        return answers
