"""The processes of :mod:`bench.kernel.worker`, seen from the benchmark: one for each group of sides, all fresh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.core import models
from bench.kernel.hosts import Subject
from bench.kernel.sides import Side


class Workers(AbstractContextManager["Workers"]):
    """A process per group of ``sides``, each side on its own copy of the model. ``absent`` says who takes no part."""

    def __init__(self, sides: Sequence[Side], subjects: Mapping[str, Subject], log: Path, caches: Path) -> None:
        self.absent: dict[str, str] = {}
        self._subjects, self._log = subjects, log
        environment = {
            **os.environ,
            "PYTHONPATH": str(models.ROOT),
            "TORCHINDUCTOR_CACHE_DIR": str(caches),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compilers are then children, whose time counts as ours
        }
        self._of = {side.name: side.process for side in sides}
        self._processes = {name: _start(environment, log) for name in dict.fromkeys(self._of.values())}
        requests = {
            side.name: {"do": "open", "side": side.name, "subject": subjects[side.name].as_dict()} for side in sides
        }
        self.ask_all(requests)

    @property
    def present(self) -> list[str]:
        """Who takes part."""
        return [name for name in self._of if name not in self.absent]

    def ask(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """What the side ``name`` answers; one that fails is absent from then on."""
        return self.ask_all({name: {**request, "side": name}})[name]

    def ask_all(self, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The same for several at once, which then work at the same time."""
        for name, request in requests.items():
            stream = self._processes[self._of[name]].stdin
            assert stream is not None
            stream.write(json.dumps(request) + "\n")
            stream.flush()
        answers = {name: self._answer(name) for name in requests}
        self.absent |= {name: answer["absent"] for name, answer in answers.items() if "absent" in answer}
        return answers

    def _answer(self, name: str) -> dict[str, Any]:
        process = self._processes[self._of[name]]
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name} ended with exit code {process.wait()}:\n{self._log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            if kind is not None:
                process.kill()
            process.communicate()  # the end of its input ends it


def _start(environment: Mapping[str, str], log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.kernel.worker"]
    with log.open("a") as stream:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env=environment,
            cwd=models.ROOT,
        )
