"""A SavedModel through the whole command, without TensorFlow: a program with an ONNX file replaces its process.

The tests of real models with TensorFlow itself are in tests/sources/test_tensorflow.py.
"""

import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from converting import ONNX_ONLY, Cli, tree
from restored import assert_restored
from savedmodels import TRANSLATES, stand_in

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.read import tensorflow

Model = Callable[..., Path]
Programs = Callable[[str], None]
_ROOT = Path(__file__).parents[4]


def _variables() -> dict[str, Any]:
    """Return what TensorFlow would have stored: the graph's weights, one transposed, an optimizer's slot."""
    found = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graphs.mlp().graph.initializer}
    return {
        "dense/kernel": found["w0"],
        "dense/bias": found["b0"],
        "dense_1/kernel": np.ascontiguousarray(found["w1"].T),
        "dense/kernel/.OPTIMIZER_SLOT/optimizer/m": found["w0"] * 0.5,
        "save_counter": np.array(1, np.int64),
        "nothing": np.empty((0, 3), np.float32),
    }


@pytest.fixture
def replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Return a function that replaces the Python with TensorFlow by a program with this code."""
    return lambda code: monkeypatch.setenv(tensorflow.VARIABLE, str(stand_in(tmp_path / "python", code)))


@pytest.fixture
def model(tmp_path: Path, replies: Programs) -> Model:
    """Return a function that writes a SavedModel and a stand-in for TensorFlow; ``twist`` changes its outputs."""

    def make(twist: str = "") -> Path:
        onnx.save(graphs.mlp(), tmp_path / "its.onnx")
        np.savez(tmp_path / "its.npz", **_variables())
        replies(TRANSLATES.format(onnx=str(tmp_path / "its.onnx"), variables=str(tmp_path / "its.npz"), twist=twist))
        return _saved(tmp_path)

    return make


def _saved(directory: Path) -> Path:
    (directory / "saved").mkdir()
    (directory / "saved" / "saved_model.pb").write_bytes(b"\x08\x01")
    return directory / "saved"


@pytest.mark.long
def test_a_savedmodel_is_converted_checked_against_tensorflow_and_restored(
    cli: Cli, model: Model, target: Path, tmp_path: Path
) -> None:
    options = ("--trust-code", "--signature", "serving_default", "--input", "x:float32:rows,16", *ONNX_ONLY)
    cli("checkpoint", model(), "--out", target, *options).published()
    manifest = Artifact.open(target).manifest
    assert manifest.source.format == "saved-model"
    assert manifest.oracle is not None
    assert manifest.oracle.checked
    assert "TensorFlow 2.21.0 running the model's own signature 'serving_default'" in manifest.oracle.how
    assert (manifest.tools["tensorflow"], manifest.tools["tf2onnx"]) == ("2.21.0", "1.17.0")
    assert {"dense/kernel", "dense_1/kernel"} <= {t.name for t in manifest.tensors if t.dtype == "bfloat16"}
    assert manifest.inputs[0].shape == ["rows", 16]
    assert json.loads((target / "manifest.json").read_text())["options"]["signature"] == "serving_default"
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert_restored(tmp_path / "fp32.safetensors", _variables())


def test_a_translation_with_other_outputs_than_tensorflow_is_not_published(
    cli: Cli, model: Model, target: Path
) -> None:
    refused = cli("checkpoint", model(twist=" * 1.01"), "--trust-code", "--out", target, *ONNX_ONLY)
    refused.refused(3, "does not give the outputs of the source itself (TensorFlow 2.21.0 running")
    assert not target.exists()


def test_a_model_that_is_a_program_is_loaded_only_with_trust(
    cli: Cli, replies: Programs, target: Path, tmp_path: Path
) -> None:
    """A file of Keras needs no trust: Keras loads it with its safe mode, which refuses code."""
    replies("reply(error=('conversion' if REQUEST['trusted'] else 'code', 'a Lambda layer'))")
    keras = tmp_path / "plain.h5"
    with zipfile.ZipFile(keras, "w") as archive:
        archive.writestr("model.weights.h5", b"")
    for path, what in (
        (_saved(tmp_path), "is a TensorFlow SavedModel"),
        (keras, "a Keras model with code in it (a La"),
    ):
        cli("checkpoint", path, "--out", target).refused(2, str(path), what, "--trust-code")
        cli("checkpoint", path, "--out", target, "--trust-code").refused(3, "a Lambda layer")


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("os.abort()", 3, "TensorFlow's process was killed by SIGABRT (out of memory?)"),
        ("print('no libcuda', file=sys.stderr); sys.exit(1)", 3, "ended with exit code 1; its last output: no libcuda"),
        ("reply(error=('usage', 'has no signature'))", 2, "saved: has no signature"),
        ("reply(error=('conversion', 'tf2onnx cannot translate it'))", 3, "saved: tf2onnx cannot translate it"),
    ],
)
def test_a_failure_of_the_tensorflow_process_is_reported_in_one_message(
    cli: Cli,
    replies: Programs,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    exit_code: int,
    said: str,
) -> None:
    replies(code)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cli("checkpoint", _saved(tmp_path), "--trust-code", "--out", target).refused(exit_code, said)
    assert not list(tmp_path.glob("bf16kit-tensorflow-*"))


@pytest.mark.long
def test_a_failure_on_a_random_sample_is_recorded(cli: Cli, model: Model, target: Path) -> None:
    path = model(twist=" if False else sys.exit('indices[0] = 9')")
    cli("checkpoint", path, "--trust-code", "--out", target).published()
    oracle = Artifact.open(target).manifest.oracle
    assert oracle is not None
    assert not oracle.checked
    assert oracle.how.endswith("ended with exit code 1; its last output: indices[0] = 9")


def test_without_tensorflow_the_error_gives_the_commands_that_install_it(
    cli: Cli, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tensorflow.VARIABLE, str(stand_in(tmp_path / "bare", "", {"tensorflow_CPU": "2.22"})))
    refused = cli("checkpoint", _saved(tmp_path), "--trust-code", "--out", target)
    refused.refused(2, "bare lacks tf2onnx;", *tensorflow.PREPARE)
    monkeypatch.delenv(tensorflow.VARIABLE)
    refused = cli("checkpoint", tmp_path / "saved", "--trust-code", "--out", target)
    refused.refused(2, f"{sys.executable} lacks tensorflow and tf2onnx")
    assert not target.parent.exists() or not tree(target.parent)


def test_the_commands_install_the_versions_that_are_tested() -> None:
    tested = set((_ROOT / "tests" / "environments" / "tensorflow.txt").read_text().split())
    said = re.findall(r"\S+==\S+", tensorflow.PREPARE[1])
    assert [pin.partition("==")[0] for pin in said] == ["tensorflow-cpu", "tf2onnx"]
    assert tested.issuperset(said)
    assert all(command in (_ROOT / "docs" / "converting.md").read_text() for command in tensorflow.PREPARE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be run as a Python"),
        (f"#!{sys.executable}\nimport sys; sys.exit('broken')", "cannot be run as a Python: broken"),
        (f"#!{sys.executable}\nprint('[1]')", "cannot be run as a Python: [1]"),
    ],
)
def test_a_python_that_is_missing_or_does_not_run_is_rejected(
    cli: Cli, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
) -> None:
    program = tmp_path / "absent"
    if text is not None:
        program.write_text(text)
        program.chmod(0o755)
    monkeypatch.setenv(tensorflow.VARIABLE, str(program))
    cli("checkpoint", _saved(tmp_path), "--trust-code", "--out", target).refused(2, str(program), said)


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("import pathlib; pathlib.Path('run').touch()")
    monkeypatch.chdir(tmp_path)
    assert tensorflow.find().python == Path(sys.executable)
    assert not (tmp_path / "run").exists()
