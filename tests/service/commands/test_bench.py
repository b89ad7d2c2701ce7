"""``bf16-serve bench``: real runs of a small model, the resulting advice, and the file that it writes."""

from __future__ import annotations

import re
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
from service.commands.layouts import Layout, layouts, smallest_worthwhile
from service.models.serving import load_serving

QUICK = ("--device", "cpu", "--seconds", "1", "--rows", "1,4")


def test_every_table_is_measured_and_the_suggestion_is_one_of_the_measured_settings(repository: Path, run: Run) -> None:
    result = run("bench", "mlp", "--repository", repository, *QUICK, "--json")
    assert result.exit_code == 0, result.output
    found = read(result)
    assert (found["model_version"], found["profile"]) == (2, "cpu")
    assert [(row["profile"], row["rows"]) for row in found["alone"]] == [("cpu", 1), ("cpu", 4)]
    assert {(row["instances"], row["threads"]) for row in found["bare"]} == {
        (each.instances, each.threads) for each in layouts("cpu")
    }
    assert {row["clients"] for row in found["served"]} == {1, 2, 4, 8, 16, 32, 64}
    assert all(0 < row["p50_ms"] <= row["p99_ms"] and row["calls"] >= 5 for row in found["served"])
    assert found["now"] == {"instances": 1, "threads": available_cpus(), "max_batch_size": 32}
    asked = found["suggested"]
    assert any(
        (row["instances"], row["threads"], row["max_batch_size"])
        == (asked["instances"], asked["threads"], asked["max_batch_size"])
        for row in found["served"]
    )
    assert not (repository / "mlp" / "serving.yaml").exists()  # only --write writes


@pytest.mark.long
def test_write_keeps_the_rest_of_serving_yaml_and_the_server_accepts_the_file(repository: Path, run: Run) -> None:
    file = repository / "mlp" / "serving.yaml"
    file.write_text("# ours\nmax_queue_size: 9  # few\ninstances: 3\n")
    result = run("bench", "mlp", "--repository", repository, *QUICK, "--write")
    assert result.exit_code == 0, result.output
    serving = load_serving(repository / "mlp")
    suggested = re.search(r"^suggested: (.*)$", result.stdout, re.MULTILINE)
    assert suggested is not None
    asked = dict(pair.split(": ") for pair in suggested[1].split(", "))
    assert [str(getattr(serving, key)) for key in asked] == list(asked.values())
    assert serving.max_queue_size == 9
    assert file.read_text().startswith("# ours\nmax_queue_size: 9  # few\n")
    assert "+threads: " in result.stdout


def test_a_version_and_shapes_may_be_chosen(repository: Path, run: Run) -> None:
    asked = ("bench", "mlp", "--repository", repository, *QUICK, "--json", "--version", 1, "--input", "x=2x16")
    found = read(run(*asked))
    assert found["model_version"] == 1
    assert found["inputs"] == {"origin": "the golden samples, shaped by --input", "shapes": {"x": [1, 16]}}


def test_samples_come_from_a_file(repository: Path, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    np.savez(file, x=np.ones((3, 16), np.float32))
    found = read(run("bench", "mlp", "--repository", repository, *QUICK, "--json", "--samples", file))
    assert found["inputs"]["origin"] == str(file)


def test_a_model_without_a_batch_axis_is_measured_one_row_at_a_time(tmp_path: Path, run: Run) -> None:
    write_artifact(
        tmp_path / "fixed" / "1",
        lambda weight: [helper.make_node("Add", ["x", weight("w")], ["y"])],
        {"w": np.ones(4, np.float32)},
        [TensorSpec("x", "float32", (4,))],
        [TensorSpec("y", "float32", (4,))],
        {"x": np.ones(4, np.float32)},
        batch_axis=None,
    )
    found = read(run("bench", "fixed", "--repository", tmp_path, "--seconds", "1", "--device", "cpu", "--json"))
    assert set(found["suggested"]) == {"instances", "threads"}
    assert {row["rows"] for row in found["bare"]} == {1}


@pytest.mark.long
def test_requests_larger_than_max_batch_size_are_measured_with_larger_batches(repository: Path, run: Run) -> None:
    (repository / "mlp" / "serving.yaml").write_text("max_batch_size: 2\n")
    found = read(
        run("bench", "mlp", "--repository", repository, *QUICK, "--rows", "1,2", "--request-rows", 4, "--json")
    )
    assert found["now"]["max_batch_size"] == 2
    assert {row["max_batch_size"] for row in found["served"]} == {4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope",), "the repository has no model 'nope'; it has mlp"),
        (("mlp", "--version", "7"), "model 'mlp' has no version 7"),
        (("mlp", "--rows", "0,4"), "--rows '0,4': expected sizes of 1 to 65536"),
        (("mlp", "--rows", "many"), "--rows 'many': expected sizes"),
        (("mlp", "--input", "z=1x16"), "--input 'z=1x16': the model's inputs are x"),
        (("mlp", "--input", "x=1x17"), "--input 'x=1x17': the model declares x[batch,16]"),
        (("mlp", "--input", "x"), "--input 'x': expected NAME=SHAPE"),
        (("mlp", "--samples", "/no/such.npz"), "--samples /no/such.npz: No such file or directory"),
        (("mlp", "--samples", "/etc/hostname"), "--samples /etc/hostname: neither .npz nor .safetensors"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    repository: Path, run: Run, arguments: tuple[str, ...], message: str
) -> None:
    result = run("bench", *arguments, "--repository", repository, "--device", "cpu")
    assert result.exit_code == 2
    assert message in one_line(result)


def test_samples_of_another_model_are_rejected(repository: Path, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "other.npz"
    np.savez(file, y=np.ones((3, 16), np.float32))
    result = run("bench", "mlp", "--repository", repository, *QUICK, "--samples", file)
    assert result.exit_code == 2
    assert "other.npz" in one_line(result)


def test_a_pickle_among_the_samples_is_not_loaded(repository: Path, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "evil.npz"
    np.savez(file, x=np.array([{"a": 1}], object))
    result = run("bench", "mlp", "--repository", repository, *QUICK, "--samples", file)
    assert result.exit_code == 2
    assert "neither .npz nor .safetensors" in one_line(result)


def test_a_serving_yaml_that_cannot_be_read_is_not_overwritten(repository: Path, run: Run) -> None:
    file = repository / "mlp" / "serving.yaml"
    file.write_text("instances: [\n")
    result = run("bench", "mlp", "--repository", repository, *QUICK, "--write")
    assert result.exit_code == 2
    assert "is not YAML" in one_line(result)
    assert file.read_text() == "instances: [\n"


def test_a_model_over_its_budget_is_not_measured(tmp_path: Path, run: Run) -> None:
    write_mlp(tmp_path / "bad" / "1", spoil=0.5)
    result = run("bench", "bad", "--repository", tmp_path, *QUICK)
    assert result.exit_code == 1
    assert "over the drift budget" in one_line(result)


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
        until(lambda: "the runtime alone" in errors.read_text() or process.poll() is not None, 60, "measuring")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, errors.read_text()
    finally:
        process.kill()
        process.wait()
    assert errors.read_text().splitlines()[-1] == "bf16-serve bench: interrupted"
    assert "Traceback" not in errors.read_text()
    assert not (repository / "mlp" / "serving.yaml").exists()


def test_layouts_use_no_core_twice() -> None:
    assert layouts("cpu")[0] == Layout(1, available_cpus())
    assert all(layout.instances * layout.threads <= available_cpus() for layout in layouts("cpu"))
    assert layouts("cuda:0") == [Layout(1, 0), Layout(2, 0), Layout(4, 0)]


def test_the_smallest_batch_within_three_percent_of_the_best_is_chosen() -> None:
    assert smallest_worthwhile({1: 50.0, 2: 97.0, 4: 98.0, 8: 100.0}) == 4
    assert smallest_worthwhile({1: 50.0, 8: 100.0, 16: 90.0}) == 8
