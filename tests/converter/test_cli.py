"""The command line itself: help, exit codes and error messages; and what ``doctor`` finds."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import click
import pytest
from converting import ONNX_ONLY, Cli, process, tree
from savedmodels import stand_in

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.cli import command, exit_code
from bf16kit.converter.commands.doctor import record
from bf16kit.converter.options import Options, parse_inputs, parse_outputs, parse_target
from bf16kit.converter.read import tensorflow
from bf16kit.messages import errors
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.ort import kernel

_ROOT = Path(__file__).parents[2]
_HEAVY = ("torch", "transformers", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "numpy", "pydantic")


def test_help_imports_nothing_heavy() -> None:
    wanted = [["--help"], ["checkpoint", "--help"], ["restore", "-h"], ["--version"]]
    code = f"import sys; from bf16kit.converter.cli import run; assert not any(map(run, {wanted})); print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not set(_HEAVY) & set(said.splitlines()[-1].split())


def test_every_command_and_option_has_a_help_text() -> None:
    assert isinstance(command, click.Group)
    assert set(command.commands) == {"checkpoint", "inspect", "verify", "explain", "recover", "restore", "doctor"}
    for found in command.commands.values():
        assert found.help
        assert all(option.help for option in found.params if isinstance(option, click.Option))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["m.onnx"], "No such command 'm.onnx'. To convert: bf16-convert checkpoint SOURCE --out REPOSITORY/MODEL/1"),
        (["checkpoint"], "Missing argument 'SOURCE'"),
        (["checkpoint", "x"], "Missing option '--out'"),
        (["checkpoint", "x", "--out", "m/1", "--format", "tflite"], "'tflite' is not one of 'onnx', 'torchscript'"),
        (["checkpoint", "x", "--out", "m/1", "--seed", "many"], "'many' is not a valid integer"),
        (["checkpoint", "x", "--out", "m/1", "--seed", "-1"], "-1 is not in the range x>=0"),
        (["checkpoint", "x", "y", "--out", "m/1"], "unexpected extra argument"),
        (["checkpoint", "x", "--out", "m/1", "--buget", "relative_l2=1"], "--budget"),
        (["verify", "x", "--profile", "tpu"], "'tpu' is not one of"),
        (["restore", "x"], "Missing option '--out'"),
    ],
)
def test_wrong_usage_exits_with_2_and_states_what_is_wrong(cli: Cli, arguments: list[str], said: str) -> None:
    cli(*arguments).refused(2, said)


def test_inputs_and_outputs_are_parsed_from_the_last_colons() -> None:
    assert parse_inputs(["ids:int64:batch, seq", "image:0:float32:n,3,8,8", "steps:int64:"]) == (
        TensorSpec("ids", "int64", ("batch", "seq")),
        TensorSpec("image:0", "float32", ("n", 3, 8, 8)),
        TensorSpec("steps", "int64", ()),
    )
    assert parse_outputs(["scores:0:logits", "y:regression"]) == {"scores:0": "logits", "y": "regression"}


def test_recorded_options_contain_no_path() -> None:
    options = Options(source=Path("/secret/place"), target=parse_target(Path("/r/m/1")), samples="/secret/samples")
    assert "secret" not in str(options.recorded())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.BudgetExceeded("over"), 1),
        (errors.UsageError("wrong"), 2),
        (errors.SourceError("damaged"), 2),
        (errors.ManifestVersionError("newer"), 2),
        (errors.InvalidRequest("does not fit"), 2),
        (errors.ConversionError("unsupported"), 3),
        (errors.RangeError("NaN"), 3),
        (errors.RuntimeFailure("does not load"), 3),
        (PermissionError(13, "Permission denied", "/x"), 2),
        (ZeroDivisionError("a bug"), 3),
    ],
)
def test_every_error_has_its_exit_code(error: Exception, code: int) -> None:
    assert exit_code(error) == code


@pytest.mark.long
def test_a_process_of_its_own_has_the_exit_code(onnx_file: Path, tmp_path: Path, target: Path) -> None:
    process("checkpoint", onnx_file, "--out", target, "--no-search", "--budget", "relative_l2=1e-9").refused(1)
    assert tree(tmp_path) == []
    done = process("checkpoint", onnx_file, "--out", target).published()
    assert done.out.startswith("m/1: within budget, ")
    assert "within budget" not in done.err  # stderr is for progress and errors only
    Artifact.open(target)


def test_a_traceback_is_shown_only_with_debug(cli: Cli, tmp_path: Path, target: Path) -> None:
    arguments = ["checkpoint", tmp_path / "absent", "--out", target]
    cli(*arguments).refused(2, "no such file")
    done = cli(*arguments, "--debug")
    assert done.code == 2
    assert "Traceback" in done.err


def test_an_eoferror_is_not_reported_as_an_interruption(
    cli: Cli, small: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """click turns an EOFError into Abort, as it does with Control-C."""

    def ended(*_: object, **__: object) -> None:
        raise EOFError("the file ended")

    monkeypatch.setattr("hashlib.file_digest", ended)
    done = cli("restore", small.path, "--out", tmp_path / "back.safetensors")
    assert done.code == 3
    assert "interrupted" not in done.err
    assert "unexpected EOFError: the file ended; this is a bug" in done.err


@pytest.mark.long
def test_control_c_reports_that_nothing_was_published(tmp_path: Path, mlp_file: Path) -> None:
    code = """import signal
def build():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    signal.raise_signal(signal.SIGINT)
"""
    (tmp_path / "impatient.py").write_text(code)
    out = ("--out", "repository/m/1", "--input", "x:float32:batch,16")
    done = process("checkpoint", mlp_file, "--model", "impatient:build", *out, cwd=tmp_path)
    assert done.code == 130
    assert done.err.endswith("interrupted; nothing was published\n")
    assert "repository" not in tree(tmp_path)


def test_a_pipe_that_closes_early_is_not_reported_as_a_bug(small: Artifact) -> None:
    """This happens in ``bf16-convert inspect … | head -1``."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [str(Path(sys.executable).with_name("bf16-convert")), "inspect", str(small.path)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert "bug" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_published_files_are_readable_by_other_users(cli: Cli, onnx_file: Path, target: Path) -> None:
    """The server runs as another user than the converter."""
    before = os.umask(0o022)
    try:
        cli("checkpoint", onnx_file, "--out", target, *ONNX_ONLY).published()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in target.iterdir()} == {0o644}
    assert target.stat().st_mode & 0o777 == 0o755


def test_a_missing_part_is_shown_with_the_command_that_installs_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = stand_in(tmp_path / "bare", "", {})
    monkeypatch.setenv(tensorflow.VARIABLE, str(bare))
    out = cli("doctor").published().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "TensorFlow SavedModel no: needs TensorFlow" in lines
    assert all(f"    {command}" in out for command in tensorflow.PREPARE)
    assert "ONNX yes" in lines


@pytest.mark.long
def test_what_messages_tell_to_install_is_an_extra_and_needs_no_index_for_bf16kit() -> None:
    """True for a checkout, and for a wheel whose name no index has: pip finds the installed bf16kit."""
    files = [file for part in ("converter", "service", "deploy") for file in (_ROOT / part).rglob("*.py")]
    named = {name for file in files for name in re.findall(r"pip install '(bf16kit\[\w+\])'", file.read_text())}
    assert len(named) >= 7
    assert named <= {f"bf16kit[{extra}]" for extra in metadata.metadata("bf16kit").get_all("Provides-Extra", ())}
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps", *sorted(named)]
    done = subprocess.run(pip, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


def test_a_source_is_possible_if_its_parts_are_installed(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = stand_in(tmp_path / "python", "")
    monkeypatch.setenv(tensorflow.VARIABLE, str(python))
    found = json.loads(cli("doctor", "--json").published().out)
    assert found["version"] == 1
    installed = {part["name"]: part for part in found["installed"]}
    assert installed["TensorFlow"] == {
        "name": "TensorFlow",
        "found": f"tensorflow 2.21.0, tf2onnx 1.17.0 in {python}",
        "remedy": "",
    }
    assert {"name": "TensorFlow SavedModel", "possible": True, "missing": []} in found["sources"]
    assert {"name": "onnx", "possible": True, "missing": []} in found["formats"]


def test_doctor_succeeds_on_a_misconfigured_machine(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tensorflow.VARIABLE, "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(kernel.VARIABLE, "abacus")
    out = cli("doctor").published().out
    assert "/nowhere/python: cannot be run as a Python" in out
    assert "apt-get install g++" in out
    assert f"{kernel.VARIABLE} is 'abacus'" in out


@pytest.mark.skipif(not kernel.configured_kernel().path, reason="the CPU kernel is not built")
@pytest.mark.parametrize("path", ["portable", ""])
def test_doctor_says_how_the_kernel_multiplies_bf16(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor may have instructions for it that are not used, because others are faster."""
    monkeypatch.setenv(kernel.VARIABLE, path)
    found = {part["name"]: part["found"] for part in record()["installed"]}
    own = f"by {kernel.configured_kernel(rounds=True).path}" if kernel.multiplies_bf16() else "emulated"
    assert found["CPU kernel"] == f"{kernel.configured_kernel().path}, bf16 products {own}"


def test_every_missing_part_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing_package(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", missing_package)
    missing = [part for part in record()["installed"] if not part["found"]]
    assert {"torch", "transformers", "onnxruntime"} <= {part["name"] for part in missing}
    assert all(part["remedy"] for part in missing)
