"""The variables of a SavedModel, read without TensorFlow: unchanged, or rejected by name."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import savedmodels
from savedmodels import entry, table, write_bundle

from bf16kit.messages.errors import SourceError
from converter.read.tensorflow import bundle, sstable
from converter.read.tensorflow.messages import message
from converter.read.tensorflow.variablenames import OBJECTS, SUFFIX

_TENSORS: dict[str, Any] = {
    "a/kernel/.ATTRIBUTES/VARIABLE_VALUE": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a/scale": np.array([1.5, -2], ml_dtypes.bfloat16),
    "count": np.array(7, np.int64),
    "empty": np.empty((0, 3), np.float32),
    "flags": np.array([True, False]),
}


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tmp_path / "model" / "variables" / "variables"


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_is_read_by_its_key_without_tensorflows_suffix(prefix: Path, shards: int) -> None:
    write_bundle(prefix, _TENSORS, shards=shards)
    found = bundle.read(prefix)
    assert set(found.tensors) == {"a/kernel", "a/scale", "count", "empty", "flags"}
    for key, array in _TENSORS.items():
        read = found.tensors[key.removesuffix(SUFFIX)]
        assert (read.dtype, read.shape) == (array.dtype, array.shape)
        assert read.tobytes() == array.tobytes()
    assert found.strings == ("_CHECKPOINTABLE_OBJECT_GRAPH",)
    assert [file.name for file in found.files] == [
        "variables.index",
        *(f"variables.data-{n:05d}-of-{shards:05d}" for n in range(shards)),
    ]


def test_a_key_keeps_its_suffix_if_another_tensor_has_the_shorter_name(prefix: Path) -> None:
    write_bundle(prefix, {"w": np.zeros(1, np.float32), f"w{SUFFIX}": np.ones(1, np.float32)})
    assert set(bundle.read(prefix).tensors) == {"w", f"w{SUFFIX}"}


def test_variables_have_the_names_of_their_layers_and_duplicates_are_read_once(prefix: Path) -> None:
    """Keras 3 exports each variable under two keys."""
    one, other = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
    tensors = {f"variables/0{SUFFIX}": one, f"_all_variables/7{SUFFIX}": one.copy(), f"variables/1{SUFFIX}": other}
    full = dict.fromkeys(tensors, "dense/kernel") | {f"variables/1{SUFFIX}": "dense/bias"}
    write_bundle(prefix, tensors, full=full)
    found = bundle.read(prefix).tensors
    assert {name: array.tobytes() for name, array in found.items()} == {
        "dense/kernel": one.tobytes(),
        "dense/bias": other.tobytes(),
    }


def test_different_variables_with_one_name_keep_their_keys(prefix: Path) -> None:
    tensors = {f"a/w{SUFFIX}": np.zeros(4, np.float32), f"b/w{SUFFIX}": -np.zeros(4, np.float32)}
    write_bundle(prefix, tensors, full=dict.fromkeys(tensors, "w"))
    assert set(bundle.read(prefix).tensors) == {"a/w", "b/w"}


def test_a_name_that_is_another_variables_key_is_not_used(prefix: Path) -> None:
    tensors = {f"a{SUFFIX}": np.zeros(4, np.float32), f"b{SUFFIX}": np.ones(4, np.float32)}
    write_bundle(prefix, tensors, full={f"a{SUFFIX}": "b", f"b{SUFFIX}": "c"})
    found = bundle.read(prefix).tensors
    assert {name: array[0] for name, array in found.items()} == {"a": 0, "c": 1}


@pytest.mark.parametrize("stored", [b"", b"\x05\0\0\0\0abc", b"\x03\0\0\0\0\xff\xff\xff", b"\xff" * 9])
def test_names_that_cannot_be_read_are_rejected(prefix: Path, stored: bytes) -> None:
    _with(prefix, OBJECTS.encode(), _entry(dtype=7, shape=(), size=len(stored)), data=stored.ljust(64, b"\0"))
    assert "truncated or damaged" in _said(prefix)


def test_a_model_without_variables_has_none(prefix: Path) -> None:
    assert bundle.read(prefix) == bundle.Bundle({}, (), ())


def test_many_keys_with_common_prefixes_are_read(prefix: Path) -> None:
    tensors = savedmodels.many(300)
    write_bundle(prefix, tensors)
    assert set(bundle.read(prefix).tensors) == set(tensors)


def _index(prefix: Path) -> Path:
    return prefix.with_name("variables.index")


def _data(prefix: Path) -> Path:
    return prefix.with_name("variables.data-00000-of-00001")


def _said(prefix: Path) -> str:
    with pytest.raises(SourceError) as refused:
        bundle.read(prefix)
    return str(refused.value)


def test_files_that_are_missing_are_named(prefix: Path) -> None:
    write_bundle(prefix, _TENSORS)
    _data(prefix).rename(prefix)
    assert f"{_data(prefix)}: is missing" in _said(prefix)
    prefix.rename(_data(prefix))
    _index(prefix).unlink()
    assert f"{_index(prefix)}: is missing, but variables.data-00000-of-00001 exists" in _said(prefix)


def test_truncated_data_is_rejected(prefix: Path) -> None:
    write_bundle(prefix, _TENSORS)
    _data(prefix).write_bytes(_data(prefix).read_bytes()[:-1])
    assert "truncated" in _said(prefix)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.95])
def test_a_truncated_index_is_rejected(prefix: Path, share: float) -> None:
    write_bundle(prefix, _TENSORS)
    whole = _index(prefix).read_bytes()
    _index(prefix).write_bytes(whole[: int(share * len(whole))])
    assert f"{_index(prefix)}: truncated or damaged: its end is not that of an index" in _said(prefix)


def test_a_flipped_bit_in_a_block_is_detected(prefix: Path) -> None:
    write_bundle(prefix, _TENSORS)
    whole = _index(prefix).read_bytes()
    for position in range(0, whole.index(b"flags"), 7):  # the first block, which has the entries
        data = bytearray(whole)
        data[position] ^= 4
        _index(prefix).write_bytes(bytes(data))
        assert "truncated or damaged" in _said(prefix)


@pytest.mark.parametrize("name", ["variables.index", "variables.data-00000-of-00001"])
def test_links_out_of_the_model_are_not_followed(prefix: Path, tmp_path: Path, name: str) -> None:
    write_bundle(prefix, _TENSORS)
    (prefix.parent / name).rename(tmp_path / "elsewhere")
    (prefix.parent / name).symlink_to(tmp_path / "elsewhere")
    assert f"{name}: is a link out of the model's directory" in _said(prefix)


@pytest.mark.parametrize("name", ["variables.index", "variables.data-00000-of-00001"])
def test_pipes_are_not_read_and_circular_links_are_not_followed(prefix: Path, name: str) -> None:
    write_bundle(prefix, _TENSORS)
    (prefix.parent / name).unlink()
    os.mkfifo(prefix.parent / name)
    assert f"{name}: is " in _said(prefix)
    (prefix.parent / name).unlink()
    (prefix.parent / name).symlink_to(name)
    assert f"{name}: is missing" in _said(prefix)


def _with(prefix: Path, name: bytes, said: bytes, *, header: bytes | None = None, data: bytes = bytes(64)) -> None:
    prefix.parent.mkdir(parents=True)
    head = message("BundleHeader")(num_shards=1).SerializeToString() if header is None else header
    _index(prefix).write_bytes(table({b"": head, name: said}))
    _data(prefix).write_bytes(data)


def _entry(*, slices: bool = False, unknown: bool = False, dtype: int = 1, **said: Any) -> bytes:
    found = entry(dtype, said.pop("shape", (4,)), said.pop("offset", 0), said.pop("size", 16), **said)
    found.shape.unknown_rank = unknown
    if slices:
        found.slices.append(b"\x0a\x00")
    return bytes(found.SerializeToString())


@pytest.mark.parametrize(
    ("said", "message_part"),
    [
        (_entry(slices=True), "'w' is stored in slices (a partitioned variable)"),
        (_entry(dtype=8, size=32), "'w' is of TensorFlow's dtype 8"),
        (_entry(size=15), "'w' is float32[4], but claims 15 bytes"),
        (_entry(shape=(-4,)), "the shape of 'w' is invalid"),
        (_entry(shape=(2**40, 2**40), size=0), "the shape of 'w' is invalid"),
        (_entry(shape=(0, 2**62, 2**62), size=0), "the shape of 'w' is invalid"),
        (_entry(shape=(1,) * 33, size=4), "the shape of 'w' is invalid"),
        (_entry(unknown=True), "the shape of 'w' is invalid"),
        (_entry(shard=1), "the position of 'w' is invalid"),
        (_entry(offset=-1), "the position of 'w' is invalid"),
        (_entry(offset=60), "'w' ends at 76"),
        (_entry(shape=(2**20,), size=2**22), "its tensors need 4194304 bytes, and the files have 64"),
        (b"\xff\xff", "the entry 'w' cannot be read"),
    ],
)
def test_false_entries_are_rejected_before_memory_is_allocated(prefix: Path, said: bytes, message_part: str) -> None:
    _with(prefix, b"w", said)
    assert message_part in _said(prefix)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"", "does not say in how many files"),
        (message("BundleHeader")(num_shards=2**30).SerializeToString(), "does not say in how many files"),
        (message("BundleHeader")(num_shards=-1).SerializeToString(), "does not say in how many files"),
        (message("BundleHeader")(num_shards=1, endianness=1).SerializeToString(), "big-endian"),
    ],
)
def test_false_headers_are_rejected(prefix: Path, header: bytes, said: str) -> None:
    _with(prefix, b"w", _entry(), header=header)
    assert said in _said(prefix)


def test_data_that_a_thousand_tensors_share_is_rejected(prefix: Path) -> None:
    prefix.parent.mkdir(parents=True)
    head = message("BundleHeader")(num_shards=1).SerializeToString()
    _index(prefix).write_bytes(table({b"": head, **{b"w%d" % n: _entry() for n in range(1000)}}))
    _data(prefix).write_bytes(bytes(64))
    assert "its tensors need 16000 bytes, and the files have 64" in _said(prefix)


def test_names_that_are_not_text_are_rejected(prefix: Path) -> None:
    _with(prefix, b"\xff\xfe", _entry())
    assert "cannot be read" in _said(prefix)


def _prefixed(prefix: Path, common: int, count: int) -> int:
    """Write an index of ``count`` keys with a prefix of ``common`` bytes, stored once; return its size in bytes."""
    prefix.parent.mkdir(parents=True)
    head = message("BundleHeader")(num_shards=1).SerializeToString()
    keys = {b"k" * common + b"%05d" % number: b"" for number in range(count)}
    _index(prefix).write_bytes(table({b"": head, **keys}))
    _data(prefix).write_bytes(b"")
    return _index(prefix).stat().st_size


def test_a_key_longer_than_the_limit_is_rejected(prefix: Path) -> None:
    _prefixed(prefix, 65_531, 1)
    said = _said(prefix)
    assert "a key has 65536 bytes; the limit is 4096" in said
    assert len(said) < 600


@pytest.mark.long
def test_keys_with_common_prefixes_are_expanded_only_up_to_a_limit(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of 102 kB, whose 4,000 keys have 65,532 bytes in common, took 290 MiB before there was a limit."""
    assert _prefixed(prefix, 4000, 4000) < 80_000
    assert "'kkkk" in _said(prefix)  # 16 MB of keys, whose entries are invalid
    assert len(_said(prefix)) < 600
    monkeypatch.setattr(sstable, "_MOST_KEYS", 1 << 20)
    tracemalloc.start()
    try:
        assert "keys of more than 1048576 bytes" in _said(prefix)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_an_index_with_too_many_entries_or_blocks_is_rejected(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _prefixed(prefix, 4, 300)
    monkeypatch.setattr(sstable, "_MOST_ENTRIES", 300)
    assert "it has more than 300 entries" in _said(prefix)
    monkeypatch.setattr(sstable, "_MOST_ENTRIES", 0)
    assert "it has more than 0 blocks" in _said(prefix)


@pytest.mark.parametrize("size", [15, 16])
def test_names_of_thousands_of_characters_are_cut_in_messages(prefix: Path, size: int) -> None:
    _with(prefix, b"k" * 4000, _entry(size=size, offset=60))
    assert f"{'k' * 100}'…" in _said(prefix)
    assert len(_said(prefix)) < 600


def test_the_checksum_is_castagnolis() -> None:
    """The expected values are in RFC 3720, B.4: for 32 bytes of zeros, and of ones."""
    assert sstable._crc32c(bytes(32)) == 0x8A9136AA
    assert sstable._crc32c(b"\xff" * 32) == 0x62A8AB43


def test_keys_out_of_order_are_rejected() -> None:
    good = table({b"a": b"1", b"b": b"2"}, shared=False)
    block = good[: good.index(b"b2") + 2]
    with pytest.raises(sstable.Damaged, match="not in order"):
        list(_reordered(block))


def _reordered(block: bytes) -> Any:
    swapped = block.replace(b"a1", b"c1")
    file = bytearray()
    place = savedmodels._put(file, savedmodels._ended(swapped))
    meta = savedmodels._put(file, savedmodels._ended(b""))
    index = savedmodels._put(file, savedmodels._ended(b"\0\1" + bytes([len(place)]) + b"z" + place))
    return sstable.entries(bytes(file) + (meta + index).ljust(40, b"\0") + sstable._MAGIC.to_bytes(8, "little"))
