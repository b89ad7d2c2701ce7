"""Safetensors, single and sharded, and the rules that a damaged file can break."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from bf16kit.converter.read.safetensors_file import read_file, read_sharded, shards
from bf16kit.messages.errors import SourceError


def _write(path: Path, header: object, data: bytes = b"", size: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + data)
    return path


def _entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_tensors_are_read_with_their_bits_and_writing_into_one_never_reaches_the_file(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    wrote: dict[str, NDArray[Any]] = {
        "w": random.standard_normal((3, 5)).astype(np.float32),
        "half": random.standard_normal(4).astype(np.float16),
        "brain": random.standard_normal(4).astype(ml_dtypes.bfloat16),
        "steps": np.array(7, np.int64),
        "mask": np.array([True, False]),
        "none": np.empty((0, 3), np.float32),
    }
    save_file(wrote, tmp_path / "m.safetensors", {"format": "pt"})
    read = read_file(tmp_path / "m.safetensors")
    assert set(read) == set(wrote)
    for name, array in wrote.items():
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
        assert read[name].tobytes() == array.tobytes()
    before = (tmp_path / "m.safetensors").read_bytes()
    read["w"][:] = 5
    assert (tmp_path / "m.safetensors").read_bytes() == before


def test_an_unknown_dtype_is_named_with_its_tensor_and_the_known_ones(tmp_path: Path) -> None:
    path = _write(tmp_path / "m", {"w": _entry("F8_E4M3", [2], 0, 2)}, bytes(2))
    with pytest.raises(SourceError, match=r"tensor 'w' has the unknown dtype 'F8_E4M3'; known: BOOL, .*F64"):
        read_file(path)


@pytest.mark.parametrize(
    ("header", "zeros", "size"),
    [
        ({"w": _entry("F32", [4], 0, 16)}, 15, None),
        ({"w": _entry("F32", [2], 0, 8), "v": _entry("F32", [2], 4, 12)}, 12, None),
        ({"w": _entry("F32", [2**40, 2**40], 0, 8)}, 8, None),
        ({"w": _entry("F32", [-2], 0, 8)}, 8, None),
        ({"w": {"dtype": "F32"}}, 0, None),
        (b"{nonsense", 0, None),
        pytest.param(b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, None, id="deep"),
        *[({}, 0, claimed) for claimed in (5000, 2**40, 2**64 - 1)],
        ({}, 100_000_001, 100_000_001),  # the format's limit is 100,000,000 bytes
    ],
)
def test_headers_that_break_a_rule_are_rejected(tmp_path: Path, header: object, zeros: int, size: int | None) -> None:
    with pytest.raises(SourceError, match=r"m: truncated or damaged: \w"):
        read_file(_write(tmp_path / "m", header, bytes(zeros), size))


@pytest.mark.parametrize("kept", [1, 7, 8, 9, 40, 100])
def test_a_file_truncated_anywhere_is_rejected(tmp_path: Path, kept: int) -> None:
    save_file({"w": np.ones(30, np.float32)}, tmp_path / "whole")
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:kept])
    with pytest.raises(SourceError, match=r"truncated|damaged"):
        read_file(tmp_path / "cut")


def _sharded(directory: Path, weight_map: dict[str, str]) -> Path:
    save_file({"a": np.ones(3, np.float32), "b": np.zeros((2, 2), np.float32)}, directory / "1.safetensors")
    save_file({"c": np.arange(4)}, directory / "2.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


def test_shards_are_read_as_one_checkpoint(tmp_path: Path) -> None:
    index = _sharded(tmp_path, {"c": "2.safetensors", "a": "1.safetensors", "b": "1.safetensors"})
    tensors, files = read_sharded(index)
    assert {name: array.tolist() for name, array in tensors.items()} == {
        "a": [1, 1, 1],
        "b": [[0, 0], [0, 0]],
        "c": [0, 1, 2, 3],
    }
    assert shards(index) == (("a", "b"), ("c",))
    assert [file.name for file in files] == [index.name, "1.safetensors", "2.safetensors"]


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"a": "3.safetensors"}, "shard 3.safetensors is missing"),
        ({"a": "/etc/passwd"}, "is not a plain file name"),
        ({"a": "a" * 300}, "is not a plain file name"),
        ({"c": "1.safetensors"}, "says that 'c' is in 1.safetensors, where it is not"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_rejected(
    tmp_path: Path, weight_map: dict[str, str], said: str
) -> None:
    with pytest.raises(SourceError, match=said):
        read_sharded(_sharded(tmp_path, weight_map))


@pytest.mark.parametrize("text", ["[]", "{}", "", '{"weight_map": ["a"]}'])
def test_a_file_that_is_not_an_index_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "i.json").write_text(text)
    with pytest.raises(SourceError, match="is not the index of a sharded checkpoint"):
        read_sharded(tmp_path / "i.json")
