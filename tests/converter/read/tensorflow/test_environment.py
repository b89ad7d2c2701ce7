"""Which Python runs TensorFlow, and the error if it does not have it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from savedmodels import stand_in

from bf16kit.messages.errors import UsageError
from converter.read.tensorflow import child, environment

_ROOT = Path(__file__).parents[4]


def test_the_running_python_is_used_unless_the_environment_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(environment.VARIABLE, raising=False)
    own = environment.find()
    assert (own.python, own.named) == (Path(sys.executable), False)
    named = stand_in(tmp_path / "python", "")
    monkeypatch.setenv(environment.VARIABLE, str(named))
    found = environment.require()
    assert (found.python, found.named, found.missing) == (named, True, ())
    assert found.versions["tensorflow"] == "2.21.0"


def test_without_tensorflow_the_error_gives_the_commands_that_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = stand_in(tmp_path / "python", "", {"tensorflow": "2.21.0", "tf2onnx": None})
    monkeypatch.setenv(environment.VARIABLE, str(python))
    with pytest.raises(UsageError) as refused:
        environment.require()
    said = str(refused.value)
    assert f"{python} lacks tf2onnx;" in said
    assert all(command in said for command in environment.PREPARE)


def test_the_commands_install_the_versions_that_are_tested() -> None:
    tested = set((_ROOT / "tests" / "sources" / "tensorflow.txt").read_text().split())
    said = re.findall(r"\S+==\S+", environment.PREPARE[1])
    assert [pin.partition("==")[0] for pin in said] == ["tensorflow-cpu", "tf2onnx"]
    assert tested.issuperset(said)
    assert all(command in (_ROOT / "docs" / "converting.md").read_text() for command in environment.PREPARE)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('broken')", "does not run as a Python: broken"),
        ("print('[]')", r"does not run as a Python: \[\]"),
        ("print('hello')", "does not run as a Python: hello"),
    ],
)
def test_a_program_that_is_not_a_python_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    monkeypatch.setenv(environment.VARIABLE, str(program))
    with pytest.raises(UsageError, match=said):
        environment.find()


def test_a_python_that_is_missing_or_cannot_be_run_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(UsageError, match=r"BF16KIT_TENSORFLOW_PYTHON=.*absent: no such file"):
        environment.find()
    (tmp_path / "absent").write_text("no program")
    with pytest.raises(UsageError, match=r"cannot be run: .*Permission denied"):
        environment.find()


def _old(path: Path) -> Path:
    """Write a wrapper of this Python that ignores PYTHONSAFEPATH, as versions before 3.11 do; return its path."""
    path.write_text(f'#!/bin/sh\nunset PYTHONSAFEPATH\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("import pathlib; pathlib.Path('run').touch()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(environment.VARIABLE, str(_old(tmp_path / "python")))
    assert environment.find().versions["python"] == sys.version.split()[0]
    assert not (tmp_path / "run").exists()


def test_modules_beside_the_program_are_not_imported(tmp_path: Path) -> None:
    """This also holds if the path of the program leads through a link."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    shutil.copy(child.__file__, tmp_path / "real" / "child.py")
    (tmp_path / "real" / "numpy.py").write_text("import pathlib; pathlib.Path('run').touch()")
    python = _old(tmp_path / "python")
    for directory in ("real", "link"):
        command = [str(python), f"{directory}/child.py"]
        asked = b'{"do": "start"}\n'
        done = subprocess.run(command, input=asked, capture_output=True, cwd=tmp_path, env=environment.variables())
        assert json.loads(done.stdout), done.stderr
        assert not (tmp_path / "run").exists()
