"""A child process of this program runs this program's code, and nothing from the working directory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from converter.process import children


def test_code_in_the_working_directory_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports do not find it, nor does the program itself. The user's PYTHONPATH stays, after the program's."""
    (tmp_path / "click.py").write_text("raise SystemExit('run from the working directory')")
    (tmp_path / "converter").mkdir()
    (tmp_path / "converter" / "__init__.py").write_text("raise SystemExit('run from the working directory')")
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    done = subprocess.run(
        children.command("converter.cli", "--version"), cwd=tmp_path, env=children.environment(), capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert children.environment()["PYTHONPATH"].split(os.pathsep)[1:] == [str(tmp_path / "mine")]
