"""Orbax checkpoints: which directory is read, its arrays bit for bit, and what is said when it is damaged."""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import orbaxfiles
import pytest
from orbaxfiles import Driver, values

from bf16kit.converter.read.detect import Kind, recognise
from bf16kit.converter.read.jax import locate, read_item
from bf16kit.messages.errors import NoCheckpoint, SourceError, UsageError

LEAVES = {
    "params.up.kernel": values(48).reshape(6, 8),
    "params.up.bias": values(8).astype(ml_dtypes.bfloat16),
    "params.half": values(8).astype(np.float16),
    "params.scale": np.array(0.5, np.float32),
    "params.zeros": np.zeros((4, 4), np.float32),
    "params.empty": np.zeros((0, 4, 4), np.float32),
    "step": np.array(2**62 + 1, np.int64),
}


def _item(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "_METADATA").write_text("{}")
    return path


def _steps(root: Path, *names: str) -> Path:
    for name in names:
        _item(root / name / "default")
        (root / name / "_CHECKPOINT_METADATA").write_text("{}")
    return root


@pytest.mark.parametrize(
    ("items", "more", "found"),
    [
        (["."], [], "."),
        ([], ["w.kernel/.zarray"], "."),  # arrays in folders, without a list
        (["3/default", "20/default", "100/default"], [], "100/default"),
        (["step_0005/default", "step_0010/default"], ["step_0010/_CHECKPOINT_METADATA"], "step_0010/default"),
        (["3/default", "9.orbax-checkpoint-tmp-1700000000/default"], [], "3/default"),
        (["3/default", "9/default"], ["3/commit_success.txt"], "3/default"),  # where commits are marked
        (["state"], ["_CHECKPOINT_METADATA"], "state"),  # the v1 API
    ],
)
def test_the_newest_finished_step_is_taken(tmp_path: Path, items: list[str], more: list[str], found: str) -> None:
    root = tmp_path / "run"
    for name in [f"{item}/_METADATA" for item in items] + more:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}")
    for path in (root, (root / found).parent if found.partition("/")[0].isdecimal() else root):
        assert recognise(path) is Kind.ORBAX
        assert locate(path, None, None) == root / found


@pytest.mark.parametrize("step", [None, 10])
def test_no_step_is_chosen_among_several_models(tmp_path: Path, step: int | None) -> None:
    root = _steps(tmp_path, "ema_10", "model_10", "old_200", "x-1", "y-1", "z-1", "z-2")
    said = r"'ema_10', 'model_10', 'old_200', 'x-1', 'y-1' and 1 more are checkpoints with different names"
    with pytest.raises(NoCheckpoint, match=said):
        recognise(root)
    with pytest.raises(NoCheckpoint, match=said):
        locate(root, step, None)
    assert locate(root / "ema_10", None, None) == root / "ema_10" / "default"


def test_a_step_or_an_item_that_does_not_exist_is_rejected_with_those_that_do(tmp_path: Path) -> None:
    root = _steps(tmp_path, "3", "20")
    _item(root / "3" / "ema")
    assert locate(root, 20, None) == root / "20" / "default"
    assert locate(root, 3, "ema") == root / "3" / "ema"
    for step, item, said in (
        (4, None, "--step 4: .* has 3, 20"),
        (3, None, "holds several items, default, ema; choose one with --item NAME"),
        (3, "other", "--item other: .* has default, ema"),
    ):
        with pytest.raises(UsageError, match=said):
            locate(root, step, item)
    for options in ((3, None), (None, "params")):
        with pytest.raises(UsageError, match=r"is a single item|has no step"):
            locate(root / "3" / "ema", *options)


def test_a_step_without_arrays_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(SourceError, match="holds no arrays that Orbax wrote"):
        locate(tmp_path, None, None)


def _read(item: Path) -> dict[str, np.ndarray]:
    return read_item(item, lambda _: True, item.parent)[0]


def _write(item: Path, leaves: dict[str, np.ndarray], *, ocdbt: bool = False, driver: Driver = "zarr") -> Path:
    pytest.importorskip("tensorstore", reason="the extra `jax` is not installed")
    chunks = {"params.up.kernel": (4, 3)}  # as four devices write it, with a remainder
    return orbaxfiles.write(item, leaves, ocdbt=ocdbt, driver=driver, chunks=chunks)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_every_layout_is_read_bit_for_bit(tmp_path: Path, driver: Driver, ocdbt: bool, listed: bool) -> None:
    item = _write(tmp_path / "item", LEAVES, ocdbt=ocdbt, driver=driver)
    if not listed:
        (item / "_METADATA").unlink()
    found = _read(item)
    assert sorted(found) == sorted(LEAVES)
    for name, array in LEAVES.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def test_an_array_that_is_not_wanted_is_not_read(tmp_path: Path) -> None:
    item = _write(tmp_path / "item", LEAVES)
    (item / "step" / "0").write_bytes(b"no zstd")
    found, others, files = read_item(item, lambda name: name != "step", tmp_path)
    assert "step" not in found
    assert others == ["step"]
    assert item / "params.up.kernel" / "0.0" in files


def test_entries_that_are_not_arrays_are_left_out(tmp_path: Path) -> None:
    item = _write(tmp_path / "item", {"w": values()})
    listed = orbaxfiles.described({"w": values()})
    listed["tree_metadata"]["('none',)"] = orbaxfiles.entry("none", value_type="None", skip_deserialize=True)
    listed["tree_metadata"]["('name',)"] = orbaxfiles.entry("name", value_type="string")
    (item / "_METADATA").write_text(json.dumps(listed))
    assert list(_read(item)) == ["w"]


_ZARRAY = "w/.zarray"


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        (_ZARRAY, b'"shape":[4,3]', b'"shape":[4,4]', 'w/0.1" is missing'),
        (_ZARRAY, b'"shape":[4,3]', b'"shape":[1099511627776,1099511627776]', "its tensors claim 4835703278458.5 TB"),
        (_ZARRAY, b'"chunks":[4,3]', b'"chunks":[35184372088832,1]', "its tensors claim 140.7 TB, but its files have"),
        (_ZARRAY, b'"<f4"', b'"<c8"', "array 'w' has the unknown dtype 'complex64'; known: bool, int8"),
        ("w/0.0", b"", b"", "Truncated Zstd-compressed stream"),
        ("_METADATA", b'"tree_metadata"', b'"tree"', "does not list the checkpoint's arrays as Orbax does"),
        ("_METADATA", b'"w"', b'"v"', "array 'v' is in the checkpoint's list, but not in its files"),
        ("_METADATA", b"{", b"", "does not list"),
    ],
)
def test_a_damaged_array_in_its_own_folder_is_rejected(
    tmp_path: Path, name: str, old: bytes, new: bytes, said: str
) -> None:
    item = _write(tmp_path / "item", {"w": values().reshape(4, 3)})
    content = (item / name).read_bytes()
    assert old in content
    (item / name).write_bytes(content.replace(old, new) if old else content[:-3])
    with pytest.raises(SourceError) as refused:
        _read(item)
    assert said in str(refused.value)
    assert str(item) in str(refused.value)


@pytest.mark.parametrize("damaged", ["manifest.ocdbt", "d/*"])
def test_a_damaged_tree_is_rejected(tmp_path: Path, damaged: str) -> None:
    item = _write(tmp_path / "item", LEAVES, ocdbt=True)
    for node in item.glob(damaged):
        content = bytearray(node.read_bytes())
        content[len(content) // 2] ^= 0xFF
        node.write_bytes(content)
    with pytest.raises(SourceError, match=r"item: .*cannot be read; damaged, or an incomplete copy: \S"):
        _read(item)


def test_chunks_of_zeros_may_be_missing_only_if_orbax_left_them_out(tmp_path: Path) -> None:
    """Older versions of Orbax left them out. If its list says that they are stored, a missing chunk is an error."""
    item = _write(tmp_path / "item", {"w": np.zeros((4, 4), np.float32)})
    (item / "w" / "0.0").unlink()
    with pytest.raises(SourceError, match="is missing"):
        _read(item)
    listed = json.loads((item / "_METADATA").read_text())
    del listed["store_array_data_equal_to_fill_value"]
    (item / "_METADATA").write_text(json.dumps(listed))
    assert not _read(item)["w"].any()


def test_without_tensorstore_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(UsageError, match=r"pip install 'bf16kit\[jax\]'"):
        read_item(tmp_path, lambda _: True, tmp_path)
