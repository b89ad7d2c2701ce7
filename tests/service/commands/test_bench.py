"""``bf16-serve bench``: real runs of a small model, the resulting suggestion, and the file that it writes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from artifacts import write_artifact, write_mlp
from commanded import Run, one_line, read
from onnx import helper
from waiting import until

from bf16kit.messages.errors import ConfigError
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import available_cpus
from service.commands.bench import update
from service.models.serving import load_serving

QUICK = ("--device", "cpu", "--seconds", "1", "--rows", "1,4")
CHANGES: dict[str, str | int] = {"max_batch_size": 8, "instances": 2, "profile": "cpu"}


def test_every_setting_is_varied_and_the_suggestion_is_one_of_the_measured_ones(repository: Path, run: Run) -> None:
    result = run("bench", "mlp", "--repository", repository, *QUICK, "--json", "--input", "x=1x16")
    assert result.exit_code == 0, result.output
    found = read(result)
    assert (found["version"], found["model_version"], found["device"]) == (2, 2, "cpu")
    assert found["inputs"] == "x[1, 16]: the golden samples, shaped by --input"
    assert found["now"] == {"profile": "cpu", "instances": 1, "max_batch_size": 32}
    assert set(found["steps"]) == {"profile", "instances", "max_batch_size"}
    assert {row["instances"] for row in found["steps"]["instances"]} >= {1, available_cpus()}
    assert {row["max_batch_size"] for row in found["steps"]["max_batch_size"]} == {1, 4, 32}  # 32 is the current one
    for row in (row for step in found["steps"].values() for row in step):
        assert row["clients"] in (1, 4, 16, 64)
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert 0 < row["slowest"] <= row["rows_per_s"] <= row["fastest"]
    suggested = found["suggested"]  # no profile: there is only one
    measured = [{key: row[key] for key in suggested} for row in found["steps"]["max_batch_size"]]
    assert suggested.keys() == {"instances", "max_batch_size"}
    assert suggested in measured
    assert not (repository / "mlp" / "serving.yaml").exists()  # only --write writes


def test_a_target_that_no_setting_meets_is_reported(repository: Path, run: Run) -> None:
    result = run("bench", "mlp", "--repository", repository, *QUICK, "--target-ms", "0.000001")
    assert result.exit_code == 0, result.output
    assert "reason: no setting keeps p99 within 1e-06 ms: the nearest gave " in result.stdout


def test_write_keeps_the_rest_of_serving_yaml_and_the_server_accepts_the_file(
    repository: Path, run: Run, tmp_path: Path
) -> None:
    file, samples = repository / "mlp" / "serving.yaml", tmp_path / "mine.npz"
    file.write_text("# ours\nmax_queue_size: 9  # few\ninstances: 1\n")
    np.savez(samples, x=np.ones((3, 16), np.float32))
    result = run("bench", "mlp", "--repository", repository, *QUICK, "--write", "--samples", samples)
    assert result.exit_code == 0, result.output
    assert f"inputs: x[1, 16]: {samples}" in result.stdout
    serving = load_serving(repository / "mlp")
    assert f"suggested: instances: {serving.instances}, max_batch_size: {serving.max_batch_size}\n" in result.stdout
    assert serving.max_batch_size in (1, 4, 32)
    assert file.read_text().startswith("# ours\nmax_queue_size: 9  # few\n")


def test_a_model_without_a_batch_axis_has_no_batch_size(tmp_path: Path, run: Run) -> None:
    write_artifact(
        tmp_path / "fixed" / "1",
        lambda weight: [helper.make_node("Add", ["x", weight("w")], ["y"])],
        {"w": np.ones(4, np.float32)},
        [TensorSpec("x", "float32", (4,))],
        [TensorSpec("y", "float32", (4,))],
        {"x": np.ones(4, np.float32)},
        batch_axis=None,
    )
    asked = ("bench", "fixed", "--repository", tmp_path, "--seconds", "1", "--device", "cpu")
    found = read(run(*asked, "--json"))
    assert set(found["suggested"]) == {"instances"}
    assert "this model has no batch axis; leave --rows out" in one_line(run(*asked, "--rows", "1"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope",), "the repository has no model 'nope'; it has mlp"),
        (("mlp", "--rows", "0,4"), "--rows '0,4': expected sizes of 1 to 65536"),
        (("mlp", "--rows", "many"), "--rows 'many': expected sizes"),
        (("mlp", "--input", "z=1x16"), "--input 'z=1x16': the inputs are x"),
        (("mlp", "--input", "x=1x17"), "shaped by --input: input 'x'"),
        (("mlp", "--input", "x"), "--input 'x': expected NAME=SHAPE"),
        (("mlp", "--samples", "/no/such.npz"), "--samples /no/such.npz: No such file or directory"),
        (("mlp", "--samples", "/etc/hostname"), "--samples /etc/hostname: neither .npz nor .safetensors"),
        (("mlp", "--samples", "other.npz"), "other.npz: "),
        (("mlp", "--samples", "empty.npz"), "empty.npz: "),
        (("mlp", "--samples", "pickled.npz"), "pickled.npz: neither .npz nor .safetensors"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    repository: Path,
    run: Run,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("other.npz", y=np.ones((3, 16), np.float32))
    np.savez("empty.npz", x=np.ones((0, 16), np.float32))
    np.savez("pickled.npz", x=np.array([{"a": 1}], object))
    result = run("bench", *arguments, "--repository", repository, "--device", "cpu")
    assert result.exit_code == 2
    assert message in one_line(result)


def test_a_model_that_cannot_be_served_is_not_measured(repository: Path, tmp_path: Path, run: Run) -> None:
    write_mlp(tmp_path / "bad" / "1", spoil=0.5)
    result = run("bench", "bad", "--repository", tmp_path, *QUICK)
    assert result.exit_code == 1
    assert "over the drift budget" in one_line(result)
    (repository / "mlp" / "serving.yaml").write_text("instances: [\n")
    result = run("bench", "mlp", "--repository", repository, *QUICK, "--write")
    assert result.exit_code == 2
    assert "is not YAML" in one_line(result)


def test_ctrl_c_ends_the_command_with_one_line_and_writes_nothing(repository: Path, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with errors.open("w") as stream:
        process = subprocess.Popen(
            [
                # As if started from a terminal: a shell makes its background processes ignore the signal.
                *("env", "--default-signal=INT"),
                *(sys.executable, "-m", "service", "bench", "mlp", "--repository", str(repository)),
                *("--device", "cpu", "--seconds", "600", "--write"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=stream,
            cwd=Path(__file__).parents[3],
        )
    try:
        until(lambda: "profile" in errors.read_text() or process.poll() is not None, 60, "measuring")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, errors.read_text()
    finally:
        process.kill()
        process.wait()
    assert errors.read_text().splitlines()[-1] == "bf16-serve bench: interrupted"
    assert "Traceback" not in errors.read_text()
    assert not (repository / "mlp" / "serving.yaml").exists()


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serving.yaml"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "max_batch_size: 8\ninstances: 2\nprofile: cpu\n"),
        (
            "# first\ninstances: 4   # four\nshadow:\n  rate: 0.5\n# instances: 9\nprofile: auto\nwarmup: [1, 2]",
            "# first\ninstances: 2   # four\nshadow:\n  rate: 0.5\n# instances: 9\nprofile: cpu\nwarmup: [1, 2]\n"
            "max_batch_size: 8\n",
        ),
        ("max_dims:\n  instances: 5\n", "max_dims:\n  instances: 5\nmax_batch_size: 8\ninstances: 2\nprofile: cpu\n"),
    ],
)
def test_comments_and_other_keys_stay_as_they_are(file: Path, before: str | None, after: str) -> None:
    if before is not None:
        file.write_text(before)
    update(file, CHANGES)
    assert file.read_text() == after
    assert [each.name for each in file.parent.iterdir()] == ["serving.yaml"]


@pytest.mark.parametrize("text", ["{instances: 4, warmup: [1]}\n", '"instances": 4\nwarmup: [1]\n', "{}\n"])
def test_a_file_that_cannot_be_changed_line_by_line_stays_and_the_error_has_the_keys(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(
        ConfigError, match="so it stays as it is; set max_batch_size: 8, instances: 2, profile: cpu yourself"
    ):
        update(file, CHANGES)
    assert file.read_text() == text


def test_permissions_and_a_link_stay(file: Path, tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    real.write_text("instances: 1\n")
    real.chmod(0o640)
    file.symlink_to(real)
    update(file, CHANGES)
    assert file.is_symlink()
    assert yaml.safe_load(real.read_text()) == CHANGES
    assert real.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("text", ["instances: [\n", "unknown: 1\n", "- 1\n"])
def test_a_file_that_is_already_invalid_is_rejected_and_not_changed(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError):
        update(file, CHANGES)
    assert file.read_text() == text
