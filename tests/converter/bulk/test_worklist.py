"""Which entries of a directory are checkpoints, and the files that each depends on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file

import graphs
from bf16kit.messages.errors import UsageError
from converter.bulk.worklist import checkpoints, files_of


def _weights(path: Path) -> Path:
    save_file({"w": np.ones(3, np.float32)}, path)
    return path


def _found(directory: Path) -> dict[str, list[str] | str]:
    found, _ = checkpoints(directory, directory / "repository")
    return {p.name: files if isinstance(files, str) else [file.name for file in files] for p, files in found.items()}


def test_checkpoints_are_found_by_content_and_the_rest_is_passed_over(tmp_path: Path) -> None:
    _weights(tmp_path / "b.weights")
    onnx.save(graphs.mlp(), tmp_path / "a.onnx")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("read me")
    (tmp_path / "samples.npz").write_bytes(b"PK\x05\x06" + bytes(18))
    for name in ("empty", ".cache", "repository"):
        (tmp_path / name).mkdir()
    assert _found(tmp_path) == {"a.onnx": ["a.onnx"], "b.weights": ["b.weights"], "hf": ["config.json"]}
    skipped = checkpoints(tmp_path, tmp_path / "repository")[1]
    assert [each.partition(":")[0] for each in skipped] == ["empty", "notes.txt", "samples.npz"]


def test_damaged_and_foreign_files_are_listed_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF\x03\0\0\0")
    (tmp_path / "b.pt").write_bytes(b"PK\x03\x04 and nothing more")
    (tmp_path / "c.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    for name in ("d", "e"):  # a single index would make the directory one model
        (tmp_path / f"{name}.safetensors.index.json").write_text('{"weight_map": {"w": "../x"}}')
    assert [str(problem).partition(" (")[0] for problem in _found(tmp_path).values()] == [
        "is a GGUF file",
        "is a truncated or damaged zip archive",
        "is a Git LFS pointer, not the file it points to",
        *["shard '../x' is not a plain file name"] * 2,
    ]


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


def test_a_directory_without_a_checkpoint_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(UsageError, match=r"holds no checkpoint\n  a.txt: is a text file"):
        _found(tmp_path)


def test_samples_in_a_directory_are_read_for_an_option(tmp_path: Path) -> None:
    sample = _weights(tmp_path / "0.safetensors")
    assert files_of(tmp_path) == [sample]
