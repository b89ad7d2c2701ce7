"""Flax's msgpack: every array is read bit for bit, and files with false claims are rejected."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import flaxfiles
import ml_dtypes
import numpy as np
import pytest
from flaxfiles import extension, packed

from bf16kit.messages.errors import SourceError
from converter.read import flax_file
from converter.read.detect import Kind, recognise
from converter.read.flax_file import read_file

W = np.arange(12, dtype=np.float32).reshape(3, 4)


def _read(tmp_path: Path, content: bytes) -> dict[str, np.ndarray]:
    path = tmp_path / "m.msgpack"
    path.write_bytes(content)
    return read_file(path, lambda _: True, tmp_path)[0]


def test_leaves_are_named_by_their_keys_in_the_files_order(tmp_path: Path) -> None:
    tree = {"params": {"b": {"kernel": W, "bias": W[0]}, "a": {"scale": W.astype(ml_dtypes.bfloat16)}}, "step": 7}
    found = _read(tmp_path, packed(tree))
    assert list(found) == ["params.b.kernel", "params.b.bias", "params.a.scale", "step"]
    assert found["params.b.kernel"].tobytes() == W.tobytes()
    assert found["params.a.scale"].dtype.name == "bfloat16"
    assert found["step"].dtype == np.int64
    assert found["step"].shape == ()
    assert int(found["step"]) == 7


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float64"]
)
def test_every_dtype_that_bf16kit_supports_is_read(tmp_path: Path, dtype: str) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    found = _read(tmp_path, packed({"pad": "x" * 3, "w": array}))["w"]
    assert found.dtype == array.dtype
    assert found.tobytes() == array.tobytes()
    assert found.flags.aligned


def test_text_and_none_are_left_out_and_list_elements_are_numbered(tmp_path: Path) -> None:
    found = _read(tmp_path, packed({"name": "mlp", "none": None, "layers": [W, {"w": W}], "rate": 0.5, "on": True}))
    assert list(found) == ["layers.0", "layers.1.w", "rate", "on"]


def test_an_array_in_chunks_is_joined(tmp_path: Path) -> None:
    found = _read(tmp_path, packed({"params": {"table": flaxfiles.chunked(W, 5)}}))
    assert found["params.table"].tobytes() == W.tobytes()
    assert found["params.table"].shape == (3, 4)


def test_unwanted_leaves_are_named_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.msgpack"
    path.write_bytes(packed({"params": {"w": W}, "opt_state": {"mu": W}}))
    found, others = read_file(path, lambda name: name.startswith("params"), tmp_path)
    assert (list(found), others) == (["params.w"], ("opt_state.mu",))


def test_empty_arrays_and_files_without_arrays_are_read(tmp_path: Path) -> None:
    assert _read(tmp_path, packed({"w": np.zeros((0, 4), np.float32)}))["w"].shape == (0, 4)
    assert _read(tmp_path, packed({"name": "nothing"})) == {}


def test_a_flax_file_is_recognised_by_its_bytes(tmp_path: Path) -> None:
    for count in (1, 15, 16, 70000):
        tree = {f"layer{index}": 1 for index in range(min(count, 300))}
        (tmp_path / "m.bin").write_bytes(packed(tree))
        assert recognise(tmp_path / "m.bin") is Kind.FLAX


def _array(shape: Any, dtype: Any, data: Any) -> bytes:
    return packed({"w": 0})[:-1] + extension(1, packed([shape, dtype, data]))


_WRONG: dict[str, tuple[bytes, str]] = {
    "cut": (packed({"w": W})[:-5], "bytes are needed"),
    "more behind": (packed({"w": W}) + b"\0", "1 bytes after its end"),
    "no map": (b"\x81\xa1w", "0 are left"),
    "too many keys": (b"\xdf\xff\xff\xff\xff\xa1w", "4294967295 values at byte 5"),
    "too long a text": (b"\x81\xdb\xff\xff\xff\xff", "4294967295 bytes are needed"),
    "an extension of 4 GB": (b"\x81\xa1w\xc9\xff\xff\xff\xff\x01", "4294967295 bytes are needed"),
    "a shape that lies": (_array([3, 5], "float32", W.tobytes()), r"float32[3, 5], and has 48 bytes"),
    "a shape beyond memory": (_array([2**40, 2**40], "float32", b""), "not [shape, dtype, bytes]"),
    "a negative size": (_array([-3, -4], "float32", W.tobytes()), "not [shape, dtype, bytes]"),
    "a shape of texts": (_array(["3"], "float32", b""), "not [shape, dtype, bytes]"),
    "objects": (_array([1], "object", bytes(8)), "unknown dtype 'object'"),
    "texts": (_array([1], "string", bytes(8)), "unknown dtype 'string'"),
    "complex numbers": (_array([1], "complex64", bytes(8)), "unknown dtype 'complex64'"),
    "no dtype": (_array([1], 7, bytes(8)), "unknown dtype '7'"),
    "another extension": (b"\x81\xa1w" + extension(5, b"abc"), "extension 5"),
    "no array inside": (b"\x81\xa1w" + extension(1, b"\x07"), "not [shape, dtype, bytes]"),
    "rest inside": (b"\x81\xa1w" + extension(1, flaxfiles.array(W) + b"\0"), "not [shape, dtype, bytes]"),
    "a name without end": (packed({"k" * 5000: {"a": W}}), "has 5000 characters; the limit is 4096"),
    "a shape numpy does not count": (_array([2**63 - 1, 2**63 - 1, 0], "float32", b""), "not [shape, dtype, bytes]"),
    "such a shape of a parted array": (
        packed(
            {"w": {"__msgpack_chunked_array__": True, "shape": dict(zip("012", (2**62, 2**62, 0), strict=True)),
                   "chunks": {"0": W[:0]}}}
        ),
        "no shape",
    ),
    "an array of many sizes": (_array([1] * 64, "float32", W[:1, :1].tobytes()), "more than 36 values"),
    "more values than any model has": (packed({"w": [{}] * 65_000} | {f"w{k}": [{}] * 65_000 for k in range(4)}),
                                       "more than 262144 values"),
    "never used": (b"\x81\xa1w\xc1", "byte 0xc1 at 3"),
    "a number as key": (b"\x82\xa1w\x01\x07\x07", "is not text"),
    "a key twice": (b"\x82\xa1w\x01\xa1w\x01", "'w' occurs twice"),
    "two of one name": (packed({"a.b": W, "a": {"b": W}}), "two arrays are called 'a.b'"),
    "no UTF-8": (b"\x81\xa2\xff\xfe\x01", "not UTF-8"),
    "deep": (b"\x81\xa1w" * 5000 + b"\x01", "deeper than 64"),
    "deep lists": (b"\x81\xa1w" + b"\x91" * 100_000 + b"\x01", "deeper than 64"),
    "parts without a shape": (packed({"w": {"__msgpack_chunked_array__": True, "chunks": {"0": W}}}), "no shape"),
    "parts that lack one": (
        packed({"w": {"__msgpack_chunked_array__": True, "shape": {"0": 12}, "chunks": {"1": W}}}),
        "no shape or no chunks",
    ),
    "parts too short": (
        packed({"w": {"__msgpack_chunked_array__": True, "shape": {"0": 13}, "chunks": {"0": W}}}),
        "its chunks have 48 bytes",
    ),
    "parts of two kinds": (
        packed({"w": {"__msgpack_chunked_array__": True, "shape": {"0": 3}, "chunks": {"0": W, "1": W.astype("i8")}}}),
        "several dtypes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", _WRONG)
def test_a_damaged_file_is_rejected_with_the_reason(tmp_path: Path, kind: str) -> None:
    content, said = _WRONG[kind]
    with pytest.raises(SourceError) as refused:
        _read(tmp_path, content)
    assert said in str(refused.value)
    assert str(refused.value).startswith(f"{tmp_path / 'm.msgpack'}: truncated or damaged")


def test_names_are_expanded_only_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 214 kB, whose 2,000 keys have 200,000 characters in common, took 417 MiB before there was a limit."""
    numbers = {f"{number:05d}": 1 for number in range(2000)}
    path = tmp_path / "m.msgpack"
    path.write_bytes(packed({"a" * 2000: {"b" * 2000: numbers}}))
    assert len(read_file(path, lambda _: True, tmp_path)[0]) == 2000
    monkeypatch.setattr(flax_file, "_LONGEST_NAMES", 1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match="the names of its arrays have more than 1048576 characters together"):
            read_file(path, lambda _: True, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


def test_a_list_of_thousands_of_numbers_is_read(tmp_path: Path) -> None:
    """A list of 2**12 numbers is valid: its length is not a false claim."""
    content = b"\x81\xa1w\xdd" + struct.pack(">I", 1 << 12) + b"\x01" * (1 << 12)
    assert len(_read(tmp_path, content)) == 1 << 12
