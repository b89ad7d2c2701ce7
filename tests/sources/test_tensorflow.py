"""Convert models of TensorFlow and Keras with the documented command, run them, and compare with TensorFlow's outputs.

``models_of_tensorflow.py`` makes the models, outputs and variables in TensorFlow's own Python, through loaders and
readers that the converter does not use.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from converting import Outcome, run_command
from documented import command, row
from restored import assert_restored
from waiting import until

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.read import tensorflow
from bf16kit.runtime.loading import load, load_reference

pytestmark = pytest.mark.sources
_HERE = Path(__file__).parent
# Of each process, the models that it makes: importing TensorFlow takes longer than all of the models.
_MODELS = (
    ("keras_cnn", "keras_file", "keras_lambda", "module", "version1", "mixed_precision", "runs_python"),
    ("keras2_trained",),
)
_ONNX_ONLY = ("--format", "onnx", "--no-report")
Made = Callable[[str], Path]
Arrays = Mapping[str, Any]


@pytest.fixture(scope="session")
def python(environment: Callable[[str], Path]) -> Path:
    return environment("tensorflow")


@pytest.fixture(scope="session")
def made(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a function that gives the directory of a model."""
    root = tmp_path_factory.mktemp("made")
    for names in _MODELS:
        command = [str(python), "-I", str(_HERE / "models_of_tensorflow.py"), str(root), *names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
    return root.joinpath


@pytest.fixture(autouse=True)
def named(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tensorflow.VARIABLE, str(python))


def _arrays(path: Path) -> dict[str, Any]:
    with np.load(path) as found:
        return dict(found)


def _convert(source: Path, target: Path, *more: str) -> Outcome:
    return run_command("checkpoint", source, "--out", target, *_ONNX_ONLY, *more).published()


def _run(artifact: Path, profile: str, feeds: Arrays) -> dict[str, Any]:
    opened = Artifact.open(artifact)
    runtime = load_reference(opened) if profile == "reference" else load(opened, profile)
    try:
        return dict(runtime.run({spec.name: feeds[spec.name] for spec in opened.manifest.inputs}))
    finally:
        runtime.close()


def _far(found: Any, expected: Any) -> float:
    """Return the relative L2 distance."""
    return float(np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected.astype(np.float64)))


def _check(made: Path, target: Path, signature: str = "serving_default", renamed: Mapping[str, str] = {}) -> None:
    """Assert that the artifact gives TensorFlow's outputs, and that restore returns the variables."""
    feeds, expected = _arrays(made / "feeds.npz"), _arrays(made / f"answers-{signature}.npz")
    oracle = Artifact.open(target).manifest.oracle
    assert oracle is not None
    assert oracle.checked
    for profile, bound in (("reference", 1e-5), ("cpu", 1.5e-2)):
        found = _run(target, profile, feeds)
        assert set(found) == {renamed.get(name, name) for name in expected}
        for name, answer in expected.items():
            assert _far(found[renamed.get(name, name)], answer) < bound, (profile, name)
    run_command("restore", target, "--out", target.parent / "fp32.safetensors").published()
    assert_restored(target.parent / "fp32.safetensors", _by_name(made))


def _by_name(made: Path) -> dict[str, Any]:
    """Return the variables as TensorFlow's own reader gives them, by the names that it stores for them."""
    names = json.loads((made / "names.json").read_text())
    stored = _arrays(made / "variables.npz")
    called = {key: names.get(key) or key.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE") for key in stored}
    # Keras does not read the states of random generators from a .keras file: it creates them when it loads the file
    return {called[key]: array for key, array in stored.items() if not called[key].endswith("/seed_generator_state")}


def _convert_as_documented(source: str, monkeypatch: pytest.MonkeyPatch, directory: Path) -> Path:
    """Run the command of a row of docs/converting.md's table exactly as the page shows it."""
    monkeypatch.chdir(directory)
    run_command(*command(source)).published()
    return directory / "REPOSITORY" / "MODEL" / "1"


def test_a_convolutional_model_of_keras_3_is_converted_as_documented_and_restored(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made("keras_cnn") / "model", tmp_path / "DIRECTORY")
    target = _convert_as_documented(row("TensorFlow SavedModel"), monkeypatch, tmp_path)
    _check(made("keras_cnn"), target)
    manifest = Artifact.open(target).manifest
    of = {entry.name: entry.tensor for entry in manifest.checkpoint}
    bf16 = {entry.name for entry in manifest.tensors if entry.file == "weights.bf16"}
    # each as it was stored: neither TensorFlow nor tf2onnx has folded the BatchNorm into it
    kernels = {"conv2d/kernel", "conv2d_transpose/kernel", "separable_conv2d/pointwise_kernel"}
    assert {of[name] for name in kernels} <= bf16


def test_a_keras_file_is_converted_as_documented_and_of_any_name_to_the_same_bytes(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keras chooses by the file name: for ``.h5`` it uses a loader that has no safe mode. The model has attention and
    an LSTM. Keras exports variables, and tf2onnx names and orders nodes, differently each time."""
    shutil.copy(made("keras_file") / "model.keras", tmp_path)
    target, other = (
        _convert_as_documented(row("Keras 3 file"), monkeypatch, tmp_path),
        tmp_path / "other" / "MODEL" / "1",
    )
    assert Artifact.open(target).manifest.source.format == "keras"
    _check(made("keras_file"), target)
    run_command("checkpoint", Path("model.keras").rename("x.h5"), "--out", other).published()
    for file in target.iterdir():
        assert (other / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_keras_file_with_a_lambda_is_converted_only_with_trust(made: Made, tmp_path: Path) -> None:
    path, target = made("keras_lambda") / "model.keras", tmp_path / "code" / "1"
    refused = run_command("checkpoint", path, "--out", target)
    refused.refused(
        2, "is a Keras model with code in it", "Lambda", "whoever writes it decides what runs", "--trust-code"
    )
    _convert(path, target, "--trust-code")
    _check(made("keras_lambda"), target)


def test_keras_safe_mode_refuses_code_that_the_config_hides(made: Made, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden.keras"
    with zipfile.ZipFile(made("keras_lambda") / "model.keras") as whole, zipfile.ZipFile(hidden, "w") as changed:
        for name in whole.namelist():
            content = whole.read(name)
            if name == "config.json":  # JSON may write a letter as its number
                content = content.replace(b'"Lambda"', b'"L\\u0061mbda"').replace(
                    b'"__lambda__"', b'"__l\\u0061mbda__"'
                )
            changed.writestr(name, content)
    refused = run_command("checkpoint", hidden, "--out", tmp_path / "m" / "1")
    refused.refused(2, "is a Keras model with code in it", "Python lambda")


def test_a_model_of_keras_2_with_its_optimizers_slots(made: Made, tmp_path: Path) -> None:
    target = tmp_path / "old" / "1"
    _convert(made("keras2_trained") / "model", target, "--trust-code")
    _check(made("keras2_trained"), target)
    assert "Adam/dense/kernel/m" in _by_name(made("keras2_trained"))


@pytest.mark.parametrize(("signature", "renamed"), [("embed", {}), ("classify", {"x": "x_output"})])
def test_a_module_with_several_signatures(
    made: Made, tmp_path: Path, signature: str, renamed: Mapping[str, str]
) -> None:
    target = tmp_path / "several" / "1"
    _convert(made("module") / "model", target, "--trust-code", "--signature", signature)
    _check(made("module"), target, signature, renamed)


def test_the_signatures_of_a_module_are_listed(made: Made, tmp_path: Path) -> None:
    refused = run_command("checkpoint", made("module") / "model", "--trust-code", "--out", tmp_path / "m" / "1")
    refused.refused(2, "choose one with --signature: classify, embed, look_up")
    refused = run_command(
        "checkpoint", made("module") / "model", "--trust-code", "--out", tmp_path / "m" / "1", "--signature", "look_up"
    )
    refused.refused(3, "'words' is sparse or ragged, holds strings")


def test_a_graph_of_tensorflow_1(made: Made, tmp_path: Path) -> None:
    target = tmp_path / "first" / "1"
    _convert(made("version1") / "model", target, "--trust-code")
    _check(made("version1"), target)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mixed_precision", "computes in bfloat16; tf2onnx would"),
        ("runs_python", "tf2onnx cannot translate it: ValidationError: No Op registered for PyFunc"),
    ],
)
def test_unsupported_models_are_rejected_by_name(made: Made, tmp_path: Path, name: str, said: str) -> None:
    run_command("checkpoint", made(name) / "model", "--trust-code", "--out", tmp_path / "m" / "1").refused(3, said)


def test_tensorflows_checksums_detect_damaged_variables(made: Made, tmp_path: Path) -> None:
    model = Path(shutil.copytree(made("version1") / "model", tmp_path / "model"))
    data = next(model.glob("variables/*.data-*"))
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    refused = run_command("checkpoint", model, "--trust-code", "--out", tmp_path / "m" / "1")
    refused.refused(2, "truncated or damaged: TensorFlow says DataLossError")


def test_tensorflow_ends_with_a_converter_that_is_killed(made: Made, tmp_path: Path) -> None:
    """Its directory goes with it: it holds a copy of the weights."""
    command = [
        sys.executable,
        "-m",
        "bf16kit.converter.cli",
        "checkpoint",
        str(made("keras_cnn") / "model"),
        "--trust-code",
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    converter = subprocess.Popen([*command, "--out", str(tmp_path / "m" / "1")], env=environment)
    until(lambda: len(list(tmp_path.glob("bf16kit-tensorflow-*/*.npy"))) > 0, 120)
    converter.kill()
    converter.wait()
    until(lambda: not list(tmp_path.glob("bf16kit-tensorflow-*")), 120)


def test_the_doctor_finds_tensorflow(python: Path) -> None:
    found = json.loads(run_command("doctor", "--json").published().out)
    assert {"name": "TensorFlow SavedModel", "possible": True, "missing": []} in found["sources"]
    (part,) = (part for part in found["installed"] if part["name"] == "TensorFlow")
    assert part["found"].endswith(f"in {python}")
