"""Orbax's arrays, read in a separate process: bit for bit in every layout, and rejected if they are incomplete."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import orbaxfiles
import pytest
from orbaxfiles import Driver, values

from bf16kit.messages.errors import SourceError
from converter.read.orbax import arrays
from converter.read.orbax.arrays import read_item

pytest.importorskip("tensorstore", reason="the extra `orbax` is not installed")

LEAVES = {
    "params.up.kernel": values(48).reshape(6, 8),
    "params.up.bias": values(8).astype(ml_dtypes.bfloat16),
    "params.scale": np.array(0.5, np.float32),
    "params.zeros": np.zeros((4, 4), np.float32),
    "step": np.array(7, np.int64),
}


def _read(item: Path, scratch: Path) -> dict[str, np.ndarray]:
    return read_item(item, lambda _: True, scratch)[0]


def _same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_every_layout_is_read_bit_for_bit(tmp_path: Path, driver: Driver, ocdbt: bool) -> None:
    chunks = {"params.up.kernel": (4, 3)}  # as four devices write it, with a remainder
    item = orbaxfiles.write(tmp_path / "item", LEAVES, ocdbt=ocdbt, driver=driver, chunks=chunks)
    _same(_read(item, tmp_path), LEAVES)


def test_without_a_list_the_arrays_in_the_directory_are_read(tmp_path: Path) -> None:
    item = orbaxfiles.write(tmp_path / "item", LEAVES, ocdbt=False, metadata=False)
    _same(_read(item, tmp_path), LEAVES)


def test_an_array_that_is_not_wanted_is_not_read(tmp_path: Path) -> None:
    item = orbaxfiles.write(tmp_path / "item", LEAVES, ocdbt=False)
    (item / "step" / "0").write_bytes(b"no zstd")
    found, others, files = read_item(item, lambda name: name != "step", tmp_path)
    assert "step" not in found
    assert others == ("step",)
    assert item / "params.up.kernel" / "0.0" in files


def test_entries_that_are_not_arrays_are_left_out(tmp_path: Path) -> None:
    item = orbaxfiles.write(tmp_path / "item", {"w": values()})
    listed = orbaxfiles.described({"w": values()})
    listed["tree_metadata"]["('none',)"] = orbaxfiles.entry("none", value_type="None", skip_deserialize=True)
    listed["tree_metadata"]["('name',)"] = orbaxfiles.entry("name", value_type="string")
    (item / "_METADATA").write_text(json.dumps(listed))
    assert list(_read(item, tmp_path)) == ["w"]


def _edit(item: Path, name: str, old: bytes, new: bytes) -> None:
    content = (item / name).read_bytes()
    assert old in content
    (item / name).write_bytes(content.replace(old, new))


_ZARRAY = "w/.zarray"


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        (_ZARRAY, b'"shape":[4,3]', b'"shape":[4,4]', "'w' has 1 of its 2 chunks; the copy is incomplete"),
        (_ZARRAY, b'"shape":[4,3]', b'"shape":[1099511627776,1099511627776]', "which does not fit in any memory"),
        (_ZARRAY, b'"shape":[4,3]', b'"shape":[4194304,4194304]', "1466016202752 chunks; that is no checkpoint"),
        (_ZARRAY, b'"shape":[4,3]', b'"shape":[-4,3]', "in which not all values are sizes"),
        (_ZARRAY, b'"shape":[4,3]', b'"shape":"4,3"', "expected a list of at most"),
        (_ZARRAY, b'"chunks":[4,3]', b'"chunks":[0,3]', "in which not all values are sizes"),
        (_ZARRAY, b'"chunks":[4,3]', b'"chunks":[4,3,1]', "has shape [4, 3] in chunks of [4, 3, 1]"),
        (_ZARRAY, b'"chunks":[4,3]', b'"chunks":[35184372088832,1]', "a chunk is at most 2 times its array"),
        (_ZARRAY, b'"chunks":[4,3]', b'"chunks":[4194304,5]', "83886080 bytes each, and shape [4, 3], 48 bytes"),
        (_ZARRAY, b'"<f4"', b'"<c8"', "has the dtype '<c8', which bf16kit does not know"),
        (_ZARRAY, b'"<f4"', b'">f4"', "has the dtype '>f4'"),
        (_ZARRAY, b'"<f4"', b'"<f8"', "cannot be read"),
        (_ZARRAY, b'"zstd"', b'"lzma"', "unknown compressor"),
        (_ZARRAY, b'"filters":null', b'"filters":[{"id":"delta"}]', "has filters"),
        (_ZARRAY, b"{", b"[", "not JSON"),
        (_ZARRAY, b'"zarr_format":2', b'"zarr_format":9', "cannot be read"),
        ("w/0.0", b"", b"", "cannot be read"),
        ("_METADATA", b'"tree_metadata"', b'"tree"', "does not list the checkpoint's arrays as Orbax does"),
        ("_METADATA", b'"w"', b'"v"', "array 'v' is in the checkpoint's list, but not in its files"),
        ("_METADATA", b'"w"', b'"../w"', "not in its files"),
        ("_METADATA", b"{", b"", "does not list"),
    ],
)
def test_a_damaged_array_in_its_own_folder_is_rejected(
    tmp_path: Path, name: str, old: bytes, new: bytes, said: str
) -> None:
    item = orbaxfiles.write(tmp_path / "item", {"w": values().reshape(4, 3)}, ocdbt=False)
    if old or new:
        _edit(item, name, old, new)
    else:
        (item / name).write_bytes((item / name).read_bytes()[:-3])
    with pytest.raises(SourceError) as refused:
        _read(item, tmp_path)
    assert said in str(refused.value)
    assert str(item) in str(refused.value)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"regular"', b'"rectilinear"', "unknown chunk grid"),
        (b'"zstd"', b'"lz4"', "unknown codec"),
        (b'"crc32c"', b'"crc64"', "unknown codec"),
        (b'"float32"', b'"float8_e4m3fn"', "'float8_e4m3fn', which bf16kit does not know"),
        (b'"node_type":"array"', b'"node_type":"group"', "is 'group', not an array"),
        (b'"codecs":[', b'"storage_transformers":[{"name":"x"}],"codecs":[', "storage transformers"),
    ],
)
def test_a_damaged_zarr3_array_is_rejected(tmp_path: Path, old: bytes, new: bytes, said: str) -> None:
    item = orbaxfiles.write(tmp_path / "item", {"w": values()}, ocdbt=False, driver="zarr3")
    _edit(item, "w/zarr.json", old, new)
    with pytest.raises(SourceError, match=said):
        _read(item, tmp_path)


@pytest.mark.parametrize("cut", [0, 1, 20, -1, -30])
def test_a_truncated_manifest_is_rejected(tmp_path: Path, cut: int) -> None:
    item = orbaxfiles.write(tmp_path / "item", LEAVES)
    (item / "manifest.ocdbt").write_bytes((item / "manifest.ocdbt").read_bytes()[:cut])
    with pytest.raises(SourceError, match=r"item: cannot be read"):
        _read(item, tmp_path)


def test_a_tree_with_missing_nodes_is_rejected(tmp_path: Path) -> None:
    item = orbaxfiles.write(tmp_path / "item", LEAVES)
    for node in (item / "d").iterdir():
        node.unlink()
    with pytest.raises(SourceError, match=r"cannot be read|chunks"):
        _read(item, tmp_path)


def test_a_tree_with_changed_nodes_is_rejected(tmp_path: Path) -> None:
    item = orbaxfiles.write(tmp_path / "item", LEAVES)
    for node in (item / "d").iterdir():
        content = bytearray(node.read_bytes())
        content[len(content) // 2] ^= 0xFF
        node.write_bytes(content)
    with pytest.raises(SourceError, match=r"cannot be read|chunks"):
        _read(item, tmp_path)


def test_a_tree_that_points_out_of_the_directory_is_rejected(tmp_path: Path) -> None:
    """OCDBT names files by paths; the paths in this manifest lead to a sound tree beside the checkpoint."""
    import tensorstore

    memory = tensorstore.KvStore.open({"driver": "memory"}).result()
    config = {"max_inline_value_bytes": 0, "manifest_kind": "single"}
    prefixes = dict.fromkeys(("btree_node_data_prefix", "value_data_prefix"), "../outside/")
    prefixes["version_tree_node_data_prefix"] = "../outside/"
    base = {"driver": "memory", "path": "item/"}
    context = tensorstore.Context()
    memory = tensorstore.KvStore.open({"driver": "memory"}, context=context).result()
    store = {"driver": "ocdbt", "base": base, "config": config, **prefixes}
    spec = {"driver": "zarr", "kvstore": {**store, "path": "w/"}, "metadata": {"shape": [12], "chunks": [12]}}
    tensorstore.open(spec, create=True, dtype="float32", context=context).result().write(values()).result()
    for key in memory.list().result():
        path = tmp_path / os.path.normpath(key.decode())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(memory[key])
    assert (tmp_path / "item" / "manifest.ocdbt").is_file()
    assert any((tmp_path / "outside").iterdir())
    with pytest.raises(SourceError, match="cannot be read"):
        _read(tmp_path / "item", tmp_path)


def test_a_chunk_that_unpacks_to_more_than_its_array_is_rejected(tmp_path: Path) -> None:
    """The chunk has four bytes of zstd for each 128 KiB; tensorstore unpacks only as much as the array has."""
    item = orbaxfiles.write(tmp_path / "item", {"w": values()}, ocdbt=False)
    block = (((128 << 10) << 3) | (1 << 1)).to_bytes(3, "little") + b"\0"  # repeated: one byte, 131,072 times
    frame = b"\x28\xb5\x2f\xfd" + b"\x00\x58" + block * 40_000 + (1).to_bytes(3, "little")
    (item / "w" / "0").write_bytes(frame)
    with pytest.raises(SourceError, match="End of data expected"):
        _read(item, tmp_path)


def test_a_chunk_that_claims_gigabytes_ends_only_the_reading_process(tmp_path: Path) -> None:
    """blosc trusts its own header and allocates that much memory; the reading process is not allowed to have it."""
    item = orbaxfiles.write(tmp_path / "item", {"w": values()}, ocdbt=False)
    _edit(item, _ZARRAY, b'{"id":"zstd","level":1}', b'{"id":"blosc","cname":"lz4","clevel":5,"shuffle":0}')
    size = 0x7FFF0000
    header = struct.pack("<BBBBIII", 2, 1, 0x20, 1, size, size, 48)
    (item / "w" / "0").write_bytes(header + struct.pack("<I", 20) + bytes(28))
    with pytest.raises(SourceError, match="tensorstore ended with SIGABRT while it read this"):
        _read(item, tmp_path)


def test_a_shape_without_elements_that_numpy_cannot_represent_is_rejected(tmp_path: Path) -> None:
    item = orbaxfiles.write(tmp_path / "item", {"w": np.zeros((0, 4, 4), np.float32)}, ocdbt=False)
    assert _read(item, tmp_path)["w"].shape == (0, 4, 4)
    _edit(item, _ZARRAY, b'"shape":[0,4,4]', b'"shape":[0,140737488355328,140737488355328]')
    with pytest.raises(SourceError, match="which does not fit in any memory"):
        _read(item, tmp_path)


def test_chunks_may_be_larger_than_a_small_array(tmp_path: Path) -> None:
    item = orbaxfiles.write(tmp_path / "item", {"w": values()}, ocdbt=False, chunks={"w": (1000,)})
    _same(_read(item, tmp_path), {"w": values()})


def test_names_that_are_too_long_together_are_rejected(tmp_path: Path) -> None:
    """A tree stores the common part of its keys once: 17,000 keys of 4,096 characters need no file of 70 MB."""
    item = orbaxfiles.write(tmp_path / "item", {"w": values()})
    with arrays._child(item) as child:
        child.ask(root=str(item), ocdbt=True, missing_is_zero=False, names=["n" * 4096] * 17_000)
        with pytest.raises(SourceError, match="more than 67108864 characters together"):
            child.receive("arrays")


def test_arrays_that_claim_more_than_any_weights_compress_to_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = orbaxfiles.write(tmp_path / "item", {"w": np.zeros((512, 512), np.float32)}, ocdbt=False)
    monkeypatch.setattr(arrays, "_ALLOWANCE", 1 << 16)
    with pytest.raises(SourceError, match=r"its arrays claim 1.0 MB, but its files have"):
        _read(item, tmp_path)


def test_chunks_of_zeros_may_be_missing_only_if_orbax_left_them_out(tmp_path: Path) -> None:
    """Older versions of Orbax left them out. If its list says that they are stored, a missing chunk is an error."""
    item = orbaxfiles.write(tmp_path / "item", {"w": np.zeros((4, 4), np.float32)}, ocdbt=False)
    (item / "w" / "0.0").unlink()
    with pytest.raises(SourceError, match="has 0 of its 1 chunks"):
        _read(item, tmp_path)
    listed = json.loads((item / "_METADATA").read_text())
    del listed["store_array_data_equal_to_fill_value"]
    (item / "_METADATA").write_text(json.dumps(listed))
    assert not _read(item, tmp_path)["w"].any()


def test_without_tensorstore_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Exception, match=r"pip install 'bf16kit\[orbax\]'"):
        _read(tmp_path, tmp_path)
