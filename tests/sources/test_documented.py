"""Run the commands of docs/converting.md for models of TensorFlow and Keras exactly as the page shows them."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from converting import process
from documented import Answers, assert_answers, command, row

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.read import tensorflow

pytestmark = pytest.mark.sources
# For each row: the model that models_of_tensorflow.py makes, its name for the source, and the row's name for it.
_MADE = {row("TensorFlow SavedModel"): ("keras_cnn", "model", "DIRECTORY"), row("Keras 3 file"): ("keras_file", "", "")}


@pytest.mark.parametrize("source", _MADE)
def test_the_command_of_a_row_works_as_documented(
    environment: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    python, (name, theirs, ours) = environment("tensorflow"), _MADE[source]
    program = Path(__file__).with_name("models_of_tensorflow.py")
    made = subprocess.run([str(python), "-I", str(program), name, str(tmp_path)], capture_output=True, timeout=300)
    assert made.returncode == 0, made.stderr[-2000:]
    if theirs:
        (tmp_path / theirs).rename(tmp_path / ours)
    monkeypatch.setenv(tensorflow.VARIABLE, os.fspath(python))
    process(*command(source), cwd=tmp_path).published()
    with np.load(tmp_path / "feeds.npz") as feeds, np.load(tmp_path / "answers-serving_default.npz") as answers:
        assert_answers(Artifact.open(tmp_path / "REPOSITORY" / "MODEL" / "1"), Answers(dict(feeds), dict(answers)))
