"""Which Python is asked for TensorFlow, and what is said where none has it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from savedmodels import stand_in

from bf16kit.errors import UsageError
from converter.sources.tensorflow import environment

_ROOT = Path(__file__).parents[4]


def test_the_running_python_unless_the_environment_names_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.VARIABLE, raising=False)
    own = environment.find()
    assert (own.python, own.named) == (Path(sys.executable), False)
    named = stand_in(tmp_path / "python", "")
    monkeypatch.setenv(environment.VARIABLE, str(named))
    found = environment.require()
    assert (found.python, found.named, found.missing) == (named, True, ())
    assert found.versions["tensorflow"] == "2.21.0"


def test_without_tensorflow_the_commands_that_bring_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = stand_in(tmp_path / "python", "", {"tensorflow": "2.21.0", "tf2onnx": None})
    monkeypatch.setenv(environment.VARIABLE, str(python))
    with pytest.raises(UsageError) as refused:
        environment.require()
    said = str(refused.value)
    assert f"{python} lacks tf2onnx;" in said
    assert all(command in said for command in environment.PREPARE)


def test_the_commands_bring_the_versions_that_are_tested() -> None:
    tested = set((_ROOT / "tests" / "sources" / "tensorflow.txt").read_text().split())
    said = re.findall(r"\S+==\S+", environment.PREPARE[1])
    assert [pin.partition("==")[0] for pin in said] == ["tensorflow-cpu", "tf2onnx"]
    assert tested.issuperset(said)
    assert all(command in (_ROOT / "docs" / "converting.md").read_text() for command in environment.PREPARE)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('broken')", "is not a Python that answers: broken"),
        ("print('[]')", r"is not a Python that answers: \[\]"),
        ("print('hello')", "is not a Python that answers: hello"),
    ],
)
def test_a_program_that_is_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    monkeypatch.setenv(environment.VARIABLE, str(program))
    with pytest.raises(UsageError, match=said):
        environment.find()


def test_a_python_that_is_not_there_or_cannot_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(UsageError, match=r"BF16KIT_TENSORFLOW_PYTHON=.*absent: no such file"):
        environment.find()
    (tmp_path / "absent").write_text("no program")
    with pytest.raises(UsageError, match=r"cannot be run: .*Permission denied"):
        environment.find()
