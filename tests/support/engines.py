"""A program called `docker` that prints recorded output of an engine, for tests of code that reads such output."""

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


class FakeDocker:
    """Puts the program on PATH. It prints the text, and ends with the exit code, of the first entry whose words begin
    the command line; any other command fails."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        directory.mkdir()
        program = directory / "docker"
        program.write_text(_PROGRAM.format(python=sys.executable), "utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")

    def set_responses(self, answers: Mapping[str, str | tuple[int, str]]) -> None:
        """Set, by the words that a command begins with, what it prints, or its exit code and its error message."""
        responses = {words: (0, answer) if isinstance(answer, str) else answer for words, answer in answers.items()}
        (self._directory / "answers.json").write_text(json.dumps(responses), "utf-8")

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of each call so far, in order."""
        return [json.loads(line) for line in (self._directory / "asked.jsonl").read_text("utf-8").splitlines()]
