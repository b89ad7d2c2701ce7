"""A program called `docker` that answers as an engine did once, for tests of what reads such answers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

_PROGRAM = """#!{python}
import json, sys
from pathlib import Path
here = Path(__file__).parent
with (here / "asked.jsonl").open("a") as asked:
    asked.write(json.dumps(sys.argv[1:]) + "\\n")
line = " ".join(sys.argv[1:])
for words, (code, text) in json.loads((here / "answers.json").read_text()).items():
    if line.startswith(words):
        print(text, file=sys.stderr if code else sys.stdout)
        sys.exit(code)
sys.exit(f"unexpected: {{line}}")
"""


class Engine:
    """Answers what begins with certain words with an exit code and a text, the first that fits; anything else fails."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        directory.mkdir()
        program = directory / "docker"
        program.write_text(_PROGRAM.format(python=sys.executable), "utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")

    def answers(self, answers: Mapping[str, str | tuple[int, str]]) -> None:
        """By the words that a command begins with: what it prints, or its exit code and what it complains of."""
        told = {words: (0, answer) if isinstance(answer, str) else answer for words, answer in answers.items()}
        (self._directory / "answers.json").write_text(json.dumps(told), "utf-8")

    @property
    def asked(self) -> list[list[str]]:
        """The arguments of each call so far."""
        return [json.loads(line) for line in (self._directory / "asked.jsonl").read_text("utf-8").splitlines()]
