"""A SavedModel through the whole command, without TensorFlow: a program with an ONNX file replaces its process.

The tests of real models with TensorFlow itself are in tests/sources/test_tensorflow.py.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from converting import ONNX_ONLY, Cli, tree
from restored import assert_restored
from savedmodels import TRANSLATES, VERSIONS, stand_in, write

import graphs
from bf16kit.artifact.artifact import Artifact
from converter.read.tensorflow import environment

Model = Callable[..., Path]


def _variables() -> dict[str, Any]:
    """Return what TensorFlow would have stored: the graph's weights, one transposed, and an optimizer's slot."""
    found = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graphs.mlp().graph.initializer}
    return {
        "dense/kernel/.ATTRIBUTES/VARIABLE_VALUE": found["w0"],
        "dense/bias/.ATTRIBUTES/VARIABLE_VALUE": found["b0"],
        "dense_1/kernel/.ATTRIBUTES/VARIABLE_VALUE": np.ascontiguousarray(found["w1"].T),
        "dense/kernel/.OPTIMIZER_SLOT/optimizer/m/.ATTRIBUTES/VARIABLE_VALUE": found["w0"] * 0.5,
        "save_counter/.ATTRIBUTES/VARIABLE_VALUE": np.array(1, np.int64),
    }


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """Return a function that writes a SavedModel and a stand-in for TensorFlow; ``twist`` changes its outputs."""

    def make(twist: str = "", proto: onnx.ModelProto | None = None) -> Path:
        onnx.save(proto or graphs.mlp(), tmp_path / "its.onnx")
        code = TRANSLATES.format(onnx=str(tmp_path / "its.onnx"), twist=twist)
        monkeypatch.setenv(environment.VARIABLE, str(stand_in(tmp_path / "python", code)))
        return write(tmp_path / "saved", tensors=_variables())

    return make


def test_a_savedmodel_is_converted_and_checked_against_tensorflow(cli: Cli, model: Model, target: Path) -> None:
    cli("checkpoint", model(), "--out", target, *ONNX_ONLY).published()
    manifest = Artifact.open(target).manifest
    assert manifest.source.format == "saved-model"
    assert manifest.oracle is not None
    assert manifest.oracle.checked
    assert "TensorFlow 2.21.0 running the model's own signature 'serving_default'" in manifest.oracle.how
    assert (manifest.tools["tensorflow"], manifest.tools["tf2onnx"]) == ("2.21.0", "1.17.0")
    assert [tensor.name for tensor in manifest.tensors if tensor.dtype == "bfloat16"] == [
        "dense/kernel",
        "dense_1/kernel",
    ]


def test_every_variable_is_restored_by_its_name_bit_for_bit(
    cli: Cli, model: Model, target: Path, tmp_path: Path
) -> None:
    cli("checkpoint", model(), "--out", target, *ONNX_ONLY).published()
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    expected = {name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE"): array for name, array in _variables().items()}
    assert_restored(tmp_path / "fp32.safetensors", expected)


@pytest.mark.long
def test_the_same_model_gives_the_same_bytes_wherever_it_is_stored(
    cli: Cli, model: Model, target: Path, tmp_path: Path
) -> None:
    first = model()
    cli("checkpoint", first, "--out", target, *ONNX_ONLY).published()
    second = Path(shutil.copytree(first, tmp_path / "elsewhere" / "copy"))
    cli("checkpoint", second, "--out", tmp_path / "again" / "m" / "1", *ONNX_ONLY).published()
    for name in tree(target):
        assert (tmp_path / "again" / "m" / "1" / name).read_bytes() == (target / name).read_bytes(), name


def test_a_translation_with_other_outputs_than_tensorflow_is_not_published(
    cli: Cli, model: Model, target: Path
) -> None:
    refused = cli("checkpoint", model(twist=" * 1.01"), "--out", target, *ONNX_ONLY)
    refused.refused(3, "does not give the outputs of the source itself (TensorFlow 2.21.0 running")
    assert not target.exists()


def test_a_signature_is_rejected_for_other_sources_and_if_it_does_not_exist(
    cli: Cli, model: Model, target: Path, onnx_file: Path
) -> None:
    refused = cli("checkpoint", onnx_file, "--out", target, "--signature", "serving_default")
    refused.refused(2, "--signature: is for TensorFlow models", "is ONNX")
    refused = cli("checkpoint", model(), "--out", target, "--signature", "embed")
    refused.refused(2, "--signature embed:", "has serving_default")
    cli("checkpoint", model(), "--out", target, "--signature", "serving_default", *ONNX_ONLY).published()


def test_the_option_model_is_rejected_and_input_names_free_dimensions(cli: Cli, model: Model, target: Path) -> None:
    refused = cli("checkpoint", model(), "--out", target, "--model", "architectures:Mlp")
    refused.refused(2, "--model: a TensorFlow SavedModel brings its own architecture")
    cli("checkpoint", model(), "--out", target, "--input", "x:float32:rows,16", *ONNX_ONLY).published()
    assert Artifact.open(target).manifest.inputs[0].shape == ["rows", 16]


def test_without_tensorflow_the_error_gives_the_commands_that_install_it(
    cli: Cli, model: Model, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model()
    python = stand_in(tmp_path / "bare", "", {"tensorflow": None, "tf2onnx": None})
    monkeypatch.setenv(environment.VARIABLE, str(python))
    refused = cli("checkpoint", path, "--out", target)
    refused.refused(2, "lacks tensorflow and tf2onnx", *environment.PREPARE)
    assert not target.parent.exists() or not tree(target.parent)


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("os.abort()", 3, "was killed by SIGABRT (out of memory?)"),
        ("for line in ASK: reply(error='ImportError: libtensorflow.so')", 3, "ImportError: libtensorflow.so"),
        (
            "ASK.readline(); reply(versions={})\n"
            "for line in ASK: reply(error='DataLossError: Checksum does not match')",
            2,
            "truncated or damaged: TensorFlow says DataLossError",
        ),
        (
            "ASK.readline(); reply(versions={}); ASK.readline(); reply()\n"
            "for line in ASK: reply(error='ValueError: StridedSlice: attribute new_axis')",
            3,
            "tf2onnx cannot translate it: ValueError: StridedSlice",
        ),
        ("for line in ASK: reply()", 2, "model.onnx"),
    ],
)
def test_a_failure_of_the_tensorflow_process_is_reported_in_one_message(
    cli: Cli,
    model: Model,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    exit_code: int,
    said: str,
) -> None:
    path = model()
    monkeypatch.setenv(environment.VARIABLE, str(stand_in(tmp_path / "failing", code)))
    cli("checkpoint", path, "--out", target).refused(exit_code, "saved", said)


def test_missing_variables_are_reported_before_tensorflow_is_started(
    cli: Cli, model: Model, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model()
    monkeypatch.setenv(environment.VARIABLE, "/nowhere/python")
    (path / "variables" / "variables.data-00000-of-00001").unlink()
    cli("checkpoint", path, "--out", target).refused(2, "variables.data-00000-of-00001: is missing")


def test_a_tensorflow_lite_model_is_rejected_with_the_remedy(cli: Cli, tmp_path: Path, target: Path) -> None:
    (tmp_path / "m.tflite").write_bytes(b"\x1c\0\0\0TFL3" + bytes(100))
    refused = cli("checkpoint", tmp_path / "m.tflite", "--out", target)
    refused.refused(2, "is a TensorFlow Lite model", "python -m tf2onnx.convert --tflite")


def _keras_file(path: Path) -> Path:
    config = {"module": "keras", "class_name": "Sequential", "config": {"layers": []}, "registered_name": "Sequential"}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("model.weights.h5", b"")
    return path


def test_keras_gets_the_file_under_the_name_that_selects_its_safe_loader(
    cli: Cli, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "ASK.readline(); reply(versions={})\nfor line in ASK:\n    path = json.loads(line)['model']\n"
        "    reply(error=f'{os.path.basename(path)} is {os.path.realpath(path)}')"
    )
    python = stand_in(tmp_path / "python", code, {**VERSIONS, "keras": "3.15.1"})
    monkeypatch.setenv(environment.VARIABLE, str(python))
    path = _keras_file(tmp_path / "x.h5")
    cli("checkpoint", path, "--out", target).refused(3, f"model.keras is {path}")


def test_a_keras_that_is_too_old_does_not_get_the_file(
    cli: Cli, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = stand_in(tmp_path / "python", "sys.exit(7)", {**VERSIONS, "keras": "3.12.0"})
    monkeypatch.setenv(environment.VARIABLE, str(python))
    refused = cli("checkpoint", _keras_file(tmp_path / "m.keras"), "--out", target)
    refused.refused(2, "has Keras 3.12.0", "pip install 'keras>=3.13.2'")


def test_the_option_signature_is_recorded(cli: Cli, model: Model, target: Path) -> None:
    cli("checkpoint", model(), "--out", target, "--signature", "serving_default", *ONNX_ONLY).published()
    assert json.loads((target / "manifest.json").read_text())["options"]["signature"] == "serving_default"
