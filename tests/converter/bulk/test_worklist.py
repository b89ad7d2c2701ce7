"""Which entries of a directory are checkpoints, the names of their models, and their files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file

import graphs
from bf16kit.messages.errors import UsageError
from converter.bulk.worklist import ModelSettings, Worklist, collect, is_collection, model_name


def _collect(directory: Path, **arguments: str) -> Worklist:
    return collect(directory, lambda file, model: ModelSettings(model, (arguments.get(file.partition(".")[0], ""),)))


def _weights(path: Path) -> Path:
    save_file({"w": np.ones(3, np.float32)}, path)
    return path


def test_a_directory_of_models_is_distinguished_from_a_model(tmp_path: Path) -> None:
    _weights(tmp_path / "a.safetensors")
    assert is_collection(tmp_path)
    assert not is_collection(tmp_path / "a.safetensors")
    assert not is_collection(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    assert not is_collection(tmp_path)


def test_foreign_directories_are_not_collections(tmp_path: Path) -> None:
    """They are rejected by name, as one source, and not searched for checkpoints."""
    (tmp_path / "model_index.json").write_text("{}")
    assert not is_collection(tmp_path)


def test_checkpoints_are_found_by_content_and_the_rest_is_passed_over(tmp_path: Path) -> None:
    _weights(tmp_path / "b.weights")
    onnx.save(graphs.mlp(), tmp_path / "a.onnx")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("read me")
    (tmp_path / "samples.npz").write_bytes(b"PK\x05\x06" + bytes(18))
    (tmp_path / "empty").mkdir()
    (tmp_path / ".cache").mkdir()
    found = _collect(tmp_path)
    assert [(item.model, item.source.name, item.problem) for item in found.items] == [
        ("a", "a.onnx", ""),
        ("b.weights", "b.weights", ""),
        ("hf", "hf", ""),
    ]
    assert [each.partition(":")[0] for each in found.skipped] == ["empty", "notes.txt", "samples.npz"]


def test_damaged_and_foreign_files_are_listed_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF\x03\0\0\0")
    (tmp_path / "b.pt").write_bytes(b"PK\x03\x04 and nothing more")
    (tmp_path / "c.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert [item.problem.partition(" (")[0] for item in _collect(tmp_path).items] == [
        "is a GGUF file",
        "is a truncated or damaged zip archive",
        "is a Git LFS pointer, not the file it points to",
    ]


def test_shards_belong_to_their_index_and_external_data_to_its_graph(tmp_path: Path) -> None:
    for name in ("a-1.safetensors", "a-2.safetensors", "other.safetensors"):
        _weights(tmp_path / name)
    index = {"weight_map": {"w": "a-1.safetensors", "v": "a-2.safetensors"}}
    for name in (
        "a.safetensors.index.json",
        "z.safetensors.index.json",
    ):  # a single index would make the directory one model
        (tmp_path / name).write_text(json.dumps(index))
    onnx.save(graphs.mlp(), tmp_path / "m.onnx")
    (tmp_path / "m.data").write_bytes(bytes(100))
    found = {item.model: [path.name for path in item.files] for item in _collect(tmp_path).items}
    assert found == {
        "a": ["a.safetensors.index.json", "a-1.safetensors", "a-2.safetensors"],
        "z": ["z.safetensors.index.json", "a-1.safetensors", "a-2.safetensors"],
        "m": ["m.onnx", "m.data"],
        "other": ["other.safetensors"],
    }


def test_two_checkpoints_of_one_model_name_are_rejected(tmp_path: Path) -> None:
    _weights(tmp_path / "a.safetensors")
    onnx.save(graphs.mlp(), tmp_path / "a.onnx")
    with pytest.raises(UsageError, match=r"a\.onnx, a\.safetensors would all become model 'a'.*--per-model"):
        _collect(tmp_path)


def test_the_error_for_a_directory_without_checkpoints_lists_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.txt").write_text("words")
    with pytest.raises(UsageError, match=r"holds no checkpoint\n  2 × is a text file"):
        _collect(tmp_path)


def test_the_repository_may_be_in_the_directory_of_checkpoints(tmp_path: Path) -> None:
    _weights(tmp_path / "a.safetensors")
    (tmp_path / "out").mkdir()
    assert collect(tmp_path, lambda _, model: ModelSettings(model, ()), tmp_path / "out").skipped == ()


def test_a_digest_changes_with_every_byte_and_every_argument(tmp_path: Path) -> None:
    path = _weights(tmp_path / "a.safetensors")
    first = _collect(tmp_path).items[0].digest()
    assert _collect(tmp_path).items[0].digest() == first
    assert _collect(tmp_path, a="--seed=1").items[0].digest() != first
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert _collect(tmp_path).items[0].digest() != first


@pytest.mark.parametrize(
    "weight_map", [{"a": ["x"]}, {"a": {}}, {"a": "x" * 300}, {"a": "\0"}, {"a": None}, {"a": "../x"}]
)
def test_an_index_that_names_no_files_does_not_affect_other_checkpoints(
    tmp_path: Path, weight_map: dict[str, object]
) -> None:
    _weights(tmp_path / "b.safetensors")
    for name in (
        "a.safetensors.index.json",
        "z.safetensors.index.json",
    ):  # a single index would make the directory one model
        (tmp_path / name).write_text(json.dumps({"weight_map": weight_map}))
    found = {item.model: item.problem for item in _collect(tmp_path).items}
    assert found["b"] == ""
    unhashable = isinstance(weight_map["a"], (list, dict))
    assert found["a"] == found["z"] == ("is not the index of a sharded checkpoint" if unhashable else "")


class TestFilesNamedByOptions:
    """Their bytes are part of the digest of a conversion's sources, wherever the files are."""

    def _digest(self, directory: Path, *named: Path) -> str:
        (directory / "models").mkdir(exist_ok=True)
        _weights(directory / "models" / "a.safetensors")
        return collect(directory / "models", lambda _, model: ModelSettings(model, (), named)).items[0].digest()

    def test_a_file(self, tmp_path: Path) -> None:
        rules = tmp_path / "rules.yaml"
        rules.write_text("rules: []")
        first = self._digest(tmp_path, rules)
        assert self._digest(tmp_path, rules) == first
        rules.write_text("rules: [ ]")
        assert self._digest(tmp_path, rules) != first

    def test_only_the_samples_in_a_directory(self, tmp_path: Path) -> None:
        samples = tmp_path / "samples"
        (samples / "deeper").mkdir(parents=True)
        _weights(samples / "0.safetensors")
        first = self._digest(tmp_path, samples)
        (samples / "README.md").write_text("no sample")
        (samples / "fifo.npz").mkdir()
        assert self._digest(tmp_path, samples) == first
        _weights(samples / "1.safetensors")
        assert self._digest(tmp_path, samples) != first

    def test_a_graph_and_files_that_may_hold_its_weights(self, tmp_path: Path) -> None:
        graph = tmp_path / "graph.onnx"
        onnx.save(graphs.mlp(), graph)
        (tmp_path / "weights.data").write_bytes(b"\1" * 100)
        first = self._digest(tmp_path, graph)
        _weights(tmp_path / "another.safetensors")
        assert self._digest(tmp_path, graph) == first
        (tmp_path / "weights.data").write_bytes(b"\2" * 100)
        assert self._digest(tmp_path, graph) != first


@pytest.mark.parametrize(
    ("file", "model"),
    [
        ("mlp.pt", "mlp"),
        ("resnet.v1.5.onnx", "resnet.v1.5"),
        ("resnet.v1", "resnet.v1"),
        ("MODEL.PT", "MODEL"),
        ("m.safetensors.index.json", "m"),
    ],
)
def test_a_model_is_named_after_its_file_without_the_extension(file: str, model: str) -> None:
    assert model_name(file) == model
