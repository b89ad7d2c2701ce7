"""The command ``bf16-convert checkpoint DIRECTORY --out REPOSITORY``."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from converting import SUPPORT, Cli, process

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.bulk.conversions import RECORDS

QUICK = ("--format", "onnx", "--profile", "cpu", "--no-report")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return a directory of two ONNX files and one file that is not a checkpoint."""
    directory = tmp_path / "models"
    directory.mkdir()
    onnx.save(graphs.mlp(), directory / "a.onnx")
    onnx.save(graphs.mlp((8, 24, 8)), directory / "b.onnx")
    (directory / "README.md").write_text("two models")
    return directory


@pytest.mark.long
def test_each_checkpoint_is_converted_once_and_the_exit_code_is_the_worst(
    cli: Cli, models: Path, tmp_path: Path
) -> None:
    """Each conversion imports all libraries, which takes over five seconds on a busy machine."""
    out = tmp_path / "repo"
    first = cli("checkpoint", models, "--out", out, *QUICK, "--jobs", "2").published()
    assert "2 of 2 checkpoints converted" in first.out
    assert "skipped: README.md: is a text file" in first.out
    assert set(Artifact.open(out / "a" / "1").manifest.profiles) == {"cpu"}
    (models / "c.gguf").write_bytes(b"GGUF\x03\0\0\0")
    onnx.save(graphs.mlp((8, 40, 8)), models / "b.onnx")
    second = cli("checkpoint", models, "--out", out, *QUICK)
    assert second.code == 2
    assert "a version 1: done before" in second.err
    assert "b version 2: converted" in second.err
    assert "c: failed: is a GGUF file" in second.err
    assert sorted(path.name for path in (out / "b").iterdir()) == ["1", "2"]


@pytest.mark.long
def test_code_beside_the_checkpoints_is_run_only_if_an_option_names_it(models: Path, tmp_path: Path) -> None:
    """A module in the working directory is imported only if an option such as `--samples` names it."""
    (models / "b.onnx").unlink()
    (models / "click.py").write_text("import pathlib; pathlib.Path('run').touch(); raise SystemExit(1)")
    (models / "bf16kit").mkdir()
    (models / "bf16kit" / "__init__.py").write_text((models / "click.py").read_text())
    (models / "samples_of_mine.py").write_text(
        "import os, sys\nsys.path[:] = [path for path in sys.path if path not in ('', os.getcwd())]\n"
        "import numpy as np\ndef feeds():\n    yield {'x': np.ones((2, 16), np.float32)}\n"
    )
    found = process(
        "checkpoint", ".", "--out", tmp_path / "r", *QUICK, "--samples", "samples_of_mine:feeds", cwd=models
    )
    assert not (models / "run").exists()
    assert "a version 1: converted" in found.err, found.err


@pytest.mark.long
def test_options_of_one_model_override_or_unset_the_command_s(cli: Cli, models: Path, tmp_path: Path) -> None:
    """One model brings its own architecture, so the ``--model`` of the others must not apply to it."""
    (models / "b.onnx").unlink()
    (tmp_path / "own").mkdir()
    given = ("--out", tmp_path / "r", *QUICK, "--seed", "1", "--model", "architectures:Mlp")
    refused = cli("checkpoint", models, *given, "--per-model", tmp_path / "own")
    assert refused.code == 2
    assert "--model: an ONNX file brings its own architecture" in refused.err
    (tmp_path / "own" / "a.onnx.yaml").write_text(
        "model: null\nformat: null\nprofile: [cuda]\nname: renamed\nseed: 7\nresidual: false\n"
        "budget: {relative_l2: 0.02}\n"
    )
    cli("checkpoint", models, *given, "--per-model", tmp_path / "own").published()
    manifest = Artifact.open(tmp_path / "r" / "renamed" / "1").manifest
    assert (manifest.seed, manifest.options["residual"], manifest.budget["relative_l2"]) == (7, False, 0.02)
    assert set(manifest.profiles) == {"cuda"}


@pytest.fixture
def heeded() -> Iterator[None]:
    """Make processes that the test starts accept SIGINT: in a shell's background job they would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.long
@pytest.mark.usefixtures("heeded")
def test_ctrl_c_keeps_finished_conversions_and_the_next_run_continues(cli: Cli, models: Path, tmp_path: Path) -> None:
    names = "abcd"  # so many that the signal arrives before the last conversion, even if this process is slow
    for name in names[2:]:
        onnx.save(graphs.mlp((8, 40, 8)), models / f"{name}.onnx")
    out = tmp_path / "repo"
    program = str(Path(sys.executable).with_name("bf16-convert"))
    command = [program, "checkpoint", str(models), "--out", str(out), *QUICK]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(SUPPORT)])}
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert running.stderr is not None
    for line in running.stderr:  # if the pipe ends here, the command has ended too, and an assertion below fails
        if "[1/4]" in line:
            break
    running.send_signal(signal.SIGINT)
    told, _ = running.communicate(timeout=120)
    assert running.returncode == 130
    done = [name for name in names if (out / name / "1").exists()]  # the next may finish before the signal arrives
    assert 1 <= len(done) < 4
    assert done == list(names[: len(done)])
    assert f"{len(done)} of 4 checkpoints converted" in told
    assert "interrupted" in told
    assert not any((out / RECORDS / f"{name}.sha256").exists() for name in names[len(done) + 1 :])  # not even started
    cli("checkpoint", models, "--out", out, *QUICK).published()
    assert all((out / name / "1").is_dir() for name in names)


@pytest.mark.long
def test_changed_samples_make_a_new_version(cli: Cli, models: Path, tmp_path: Path) -> None:
    (models / "b.onnx").unlink()
    samples = tmp_path / "sample.npz"
    for value, status in ((1, "version 1: converted"), (1, "version 1: done before"), (2, "version 2: converted")):
        np.savez(samples, x=np.full((2, 16), value, np.float32))
        found = cli("checkpoint", models, "--out", tmp_path / "r", *QUICK, "--samples", samples)
        assert f"a {status}" in found.err


@pytest.mark.parametrize(
    ("source", "out", "arguments", "said"),
    [
        ("", "repo", ["--input", "x"], ["a.onnx: --input 'x'"]),
        ("a.onnx", "m/1", ["--jobs", "2"], ["are only for a directory of checkpoints"]),
        ("a.onnx", "m/1", ["--ray", "auto"], ["--ray are only for a directory of checkpoints"]),
        ("", "m/1", [], ["is not a model", "to convert all checkpoints in it, pass --out REPOSITORY"]),
        ("a.onnx", "repo", [], ["must end in MODEL/VERSION"]),
    ],
)
def test_a_wrong_option_is_reported_before_work_begins(
    cli: Cli, models: Path, tmp_path: Path, source: str, out: str, arguments: list[str], said: list[str]
) -> None:
    cli("checkpoint", models / source, "--out", tmp_path / out, *arguments).refused(2, *said)
    assert not (tmp_path / out).exists()


def test_a_stray_file_that_makes_the_directory_one_source_is_named(cli: Cli, models: Path, tmp_path: Path) -> None:
    (models / "other.pdparams").write_text("")
    said = ("must end in MODEL/VERSION", "is a PaddlePaddle model")
    cli("checkpoint", models, "--out", tmp_path / "repo").refused(2, *said)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("aa", "seed: 1", "there is no checkpoint of that name"),
        (
            "a",
            "sed: 1\nsead: 1\nsed1: 1",
            "unknown options 'sed' (did you mean seed?), 'sead' (did you mean seed?), 'sed1'",
        ),
        ("a", "out: elsewhere", "unknown option 'out'"),
        ("a", "saturate: 1", "a.onnx: Option '--saturate' does not take a value"),
        ("a", "seed: [1, 2]", "a.onnx: '[1, 2]' is not a valid integer"),
        ("a", "- seed", "expected keys and values, found list"),
        (
            "a",
            "seed: 1\nname: a: b",
            "a.yaml: line 2, column 8: is not YAML: mapping values are not allowed here\n  name: a: b\n         ^",
        ),
        ("a", "name: [a]", "a.yaml: \"['a']\" is not a model name"),
        ("a", "name: ../outside", "a.yaml: '../outside' is not a model name"),
        ("a", "name: ''", "a.yaml: '' is not a model name"),
        ("a", "name: b", "b.onnx would both become model 'b'"),
    ],
)
def test_a_mistake_in_the_options_of_one_model_is_reported_with_its_file(
    cli: Cli, models: Path, tmp_path: Path, file: str, content: str, said: str
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / f"{file}.yaml").write_text(content)
    done = cli("checkpoint", models, "--out", tmp_path / "repo", "--per-model", tmp_path / "own").refused(2, said)
    assert f"{file}." in done.err
    assert not (tmp_path / "repo").exists()


def test_an_options_file_beside_a_checkpoint_is_ignored_without_per_model(
    cli: Cli, models: Path, tmp_path: Path
) -> None:
    """Otherwise the author of a checkpoint could choose which code the converter imports."""
    (models / "a.yaml").write_text("sed: 1")
    (models / "my model.onnx").write_bytes((models / "a.onnx").read_bytes())
    cli("checkpoint", models, "--out", tmp_path / "repo").refused(2, "'my model' is not a model name")


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here: tests/ray has the rest")
def test_without_ray_the_error_names_the_extra(cli: Cli, models: Path, tmp_path: Path) -> None:
    cli("checkpoint", models, "--out", tmp_path / "repo", *QUICK, "--ray", "auto").refused(
        2, "--ray needs Ray: pip install 'bf16kit[ray]'"
    )
