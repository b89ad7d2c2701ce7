"""``bf16-serve bench``: real runs of a small model, and the resulting suggestion."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_artifact, write_mlp
from commanded import Run, one_line, read
from onnx import helper
from waiting import until

from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import available_cpus

QUICK = ("--device", "cpu", "--seconds", "1", "--rows", "1,4")


@pytest.mark.long
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


@pytest.mark.long
def test_a_model_without_a_batch_axis_has_no_size_and_a_target_that_nothing_meets_is_reported(
    tmp_path: Path, run: Run
) -> None:
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
    found = read(run(*asked, "--json", "--target-ms", "0.000001"))
    assert set(found["suggested"]) == {"instances"}
    assert found["reason"].startswith("no setting keeps p99 within 1e-06 ms: the nearest gave ")
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
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    repository: Path, run: Run, arguments: tuple[str, ...], message: str
) -> None:
    result = run("bench", *arguments, "--repository", repository, "--device", "cpu")
    assert result.exit_code == 2
    assert message in one_line(result)


def test_a_model_that_cannot_be_served_is_not_measured(repository: Path, tmp_path: Path, run: Run) -> None:
    write_mlp(tmp_path / "bad" / "1", spoil=0.5)
    result = run("bench", "bad", "--repository", tmp_path, *QUICK)
    assert result.exit_code == 1
    assert "over the drift budget" in one_line(result)
    (repository / "mlp" / "serving.yaml").write_text("instances: [\n")
    result = run("bench", "mlp", "--repository", repository, *QUICK)
    assert result.exit_code == 2
    assert "is not YAML" in one_line(result)


@pytest.mark.long
def test_ctrl_c_ends_the_command_with_one_line(repository: Path, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with errors.open("w") as stream:
        # As if started from a terminal: a shell makes its background processes ignore the signal.
        command = ["env", "--default-signal=INT", sys.executable, "-m", "bf16kit.service", "bench", "mlp"]
        command += ["--repository", str(repository), "--device", "cpu", "--seconds", "600"]
        root = Path(__file__).parents[3]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stream, cwd=root)
    try:
        until(lambda: "profile" in errors.read_text() or process.poll() is not None, 60, "measuring")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, errors.read_text()
    finally:
        process.kill()
        process.wait()
    assert errors.read_text().splitlines()[-1] == "bf16-serve bench: interrupted"
    assert "Traceback" not in errors.read_text()
