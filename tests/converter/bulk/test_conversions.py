"""Which entries of a directory are checkpoints; each is converted in its own process, and the next run knows that."""

import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import MANIFEST
from bf16kit.converter.bulk.conversions import RECORDS, Conversion, Run, checkpoints, convert, files_of, run_here
from bf16kit.messages.errors import UsageError

Convert = Callable[..., Conversion]


def _weights(path: Path) -> Path:
    save_file({"w": np.ones(3, np.float32)}, path)
    return path


def _found(directory: Path) -> dict[str, list[str]]:
    found, _ = checkpoints(directory, directory / "repository")
    return {path.name: [file.name for file in files] for path, files in found.items()}


def test_checkpoints_are_found_by_content_and_the_rest_is_passed_over(tmp_path: Path) -> None:
    _weights(tmp_path / "b.weights")
    onnx.save(graphs.mlp(), tmp_path / "a.onnx")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "c.gguf").write_bytes(b"GGUF\x03\0\0\0")  # its conversion fails, with the reason
    (tmp_path / "notes.txt").write_text("read me")
    (tmp_path / "samples.npz").write_bytes(b"PK\x05\x06" + bytes(18))
    for name in ("empty", ".cache", "repository"):
        (tmp_path / name).mkdir()
    assert _found(tmp_path) == {"a.onnx": ["a.onnx"], "b.weights": ["b.weights"], "c.gguf": [], "hf": ["config.json"]}
    skipped = checkpoints(tmp_path, tmp_path / "repository")[1]
    assert [each.partition(":")[0] for each in skipped] == ["empty", "notes.txt", "samples.npz"]


def test_shards_belong_to_their_index_and_external_data_to_its_graph(tmp_path: Path) -> None:
    for name in ("1.safetensors", "2.safetensors", "other.safetensors"):
        _weights(tmp_path / name)
    for name in ("a", "z"):
        save_file({name: np.ones(3, np.float32)}, tmp_path / f"{name}-2.safetensors")
        index = {"weight_map": {"w": "1.safetensors", name: f"{name}-2.safetensors"}}
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "2.safetensors").unlink()
    onnx.save(graphs.mlp(), tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    (tmp_path / "another.data").write_bytes(bytes(100))
    assert _found(tmp_path) == {
        "a.safetensors.index.json": ["a.safetensors.index.json", "1.safetensors", "a-2.safetensors"],
        "m.onnx": ["m.onnx", "m.data"],
        "other.safetensors": ["other.safetensors"],
        "z.safetensors.index.json": ["z.safetensors.index.json", "1.safetensors", "z-2.safetensors"],
    }


def test_a_directory_without_a_checkpoint_is_rejected_and_one_of_samples_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(UsageError, match=r"holds no checkpoint\n  a.txt: is a text file"):
        _found(tmp_path)
    assert files_of(tmp_path) == [tmp_path / "a.txt"]


@pytest.fixture
def item(tmp_path: Path) -> Conversion:
    onnx.save(graphs.mlp(), tmp_path / "m.onnx")
    return Conversion("m", tmp_path / "m.onnx", [], [tmp_path / "m.onnx"])


def ending(code: str) -> Run:
    """Return what runs the Python program ``code`` in a process instead of a conversion."""
    return lambda _, log, stop: run_here([sys.executable, "-c", code], log, stop)


@pytest.fixture
def converted(item: Conversion, tmp_path: Path, small: Artifact) -> Convert:
    """Return what converts ``item``, or another; the "conversion" publishes ``small``."""
    (tmp_path / "r" / RECORDS).mkdir(parents=True)

    def publish(command: list[str], _log: Path, _stop: threading.Event) -> int:
        shutil.copytree(small.path, command[command.index("--out") + 1], dirs_exist_ok="--force" in command)
        return 0

    def run(how: Run = publish, *, arguments: tuple[str, ...] = (), force: bool = False) -> Conversion:
        again = Conversion(item.model, item.source, [*arguments], item.files)
        return convert(again, tmp_path / "r", how, threading.Event(), force=force)

    return run


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "exits", "said"),
    [
        ("import sys; print('bf16-convert: error: drift over budget'); sys.exit(1)", 1, "over budget: drift over"),
        ("import sys; print('bf16-convert: error: m: bad\\nmore'); sys.exit(3)", 3, "failed: m: bad"),
        ("import sys; sys.exit(3)", 3, "failed: ended with exit code 3; see "),
        ("import sys; sys.exit(130)", 130, "interrupted"),
        ("import os; os.kill(os.getpid(), 9)", 3, "failed: killed by SIGKILL (out of memory?)"),
        ("import os; os.kill(os.getpid(), 11)", 3, "failed: ended with exit code -11; see "),
        ("raise ValueError('boom')", 3, "failed: ended with exit code 1; see "),
    ],
)
def test_the_outcome_states_how_the_process_ended(converted: Convert, code: str, exits: int, said: str) -> None:
    found = converted(ending(code))
    assert (found.code, found.version) == (exits, None)
    assert found.result.startswith(said)
    assert converted().version == 1


def test_the_same_is_not_converted_again_and_other_bytes_or_options_make_the_next_version(
    converted: Convert, item: Conversion
) -> None:
    assert converted().result == "converted"
    again = converted(ending("1/0"))
    assert (again.result, again.code, again.version) == ("done before", 0, 1)
    assert converted(arguments=("--seed", "1")).version == 2
    onnx.save(graphs.mlp((8, 8, 8)), item.source)
    assert converted().version == 3
    item.source.unlink()
    gone = converted()
    assert (gone.code, gone.result) == (2, "failed: cannot be read: No such file or directory")


def test_force_replaces_the_newest_version_and_a_failure_keeps_it(converted: Convert) -> None:
    converted()
    assert converted(ending("1/0"), force=True).result.startswith("failed")
    assert converted(ending("1/0")).result == "done before"
    assert (converted(force=True).version, converted(ending("1/0")).result) == (1, "done before")


def test_a_version_from_elsewhere_is_neither_replaced_nor_taken_for_done(
    converted: Convert, tmp_path: Path, small: Artifact
) -> None:
    converted()
    version = tmp_path / "r" / "m" / "1"
    manifest = Artifact.open(version, verify=False).manifest
    (version / MANIFEST).write_bytes(manifest.model_copy(update={"seed": manifest.seed + 1}).dumps())
    assert converted().version == 2
    shutil.copytree(small.path, tmp_path / "r" / "m" / "7")
    (tmp_path / "r" / "m" / "7" / MANIFEST).unlink()
    assert converted().version == 8
