"""An export's files: where their tensors are stored, and that reading them back finds a fault in writing."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from bf16kit.converter.write import export as safetensors
from bf16kit.converter.write.export import Exported, Place, Selection, write_export
from bf16kit.converter.write.readback import check_export
from bf16kit.converter.write.weights import Rounding
from bf16kit.messages.errors import ArtifactDamaged, ConversionError, UsageError
from bf16kit.numerics.rounding import to_bf16
from bf16kit.numerics.tensors import Array

CHECKPOINT: dict[str, Array] = {
    "odd": np.random.default_rng(0).normal(size=(17, 17)).astype(np.float32),
    "flag": np.ones(3, np.bool_),
    "vector": np.arange(5, dtype=np.float32),
    "steps": np.array(7, np.int64),
    "empty": np.zeros((0, 4), np.float32),
    "half": np.ones((2, 3), ml_dtypes.bfloat16),
}
SELECTION: Selection = {"odd": "weight"}
ROUNDING = Rounding()


def _written(path: Path, shards: tuple[tuple[str, ...], ...] = ()) -> Exported:
    return write_export(CHECKPOINT, shards, SELECTION, path, ROUNDING)


def test_each_tensor_is_aligned_to_its_own_size_and_listed_as_in_the_checkpoint(tmp_path: Path) -> None:
    done = _written(tmp_path)
    found = safetensors.read(tmp_path / "model.safetensors")
    assert list(found) == list(CHECKPOINT)
    for name, written in done.tensors.items():
        assert written.offset % found[name].dtype.itemsize == 0, name
        assert found[name].flags.aligned, name
    assert found["odd"].tobytes() == to_bf16(CHECKPOINT["odd"]).tobytes()
    plain = {name: array for name, array in CHECKPOINT.items() if name != "odd"}
    assert all(found[name].tobytes() == array.tobytes() for name, array in plain.items())
    assert found["steps"].shape == ()
    assert load_file(tmp_path / "model.safetensors").keys() == CHECKPOINT.keys()  # the library's own reader


def test_tensors_that_no_shard_of_the_source_names_go_into_the_last(tmp_path: Path) -> None:
    done = _written(tmp_path, (("odd",), ("flag", "vector")))
    assert done.files == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert list(safetensors.read(tmp_path / done.files[0])) == ["odd"]
    assert list(safetensors.read(tmp_path / done.files[1])) == ["flag", "vector", "steps", "empty", "half"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("odd", "exported values that differ from the source's rounded values"), ("vector", "is not exported unchanged")],
)
def test_one_wrong_bit_and_a_missing_tensor_are_found_by_reading_back(tmp_path: Path, name: str, said: str) -> None:
    done = _written(tmp_path)
    check_export(tmp_path, done, CHECKPOINT, ROUNDING)
    with pytest.raises(ConversionError, match="'more' is missing from either the checkpoint or its export"):
        check_export(tmp_path, done, CHECKPOINT | {"more": np.ones(1)}, ROUNDING)
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[done.tensors[name].offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConversionError, match=f"tensor '{name}'.*{said}"):
        check_export(tmp_path, done, CHECKPOINT, ROUNDING)


def test_a_truncated_file_is_reported_as_damaged(tmp_path: Path) -> None:
    done = _written(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactDamaged, match=r"model\.safetensors"):
        safetensors.read(path)
    with pytest.raises(ConversionError, match="what was written cannot be read back"):
        check_export(tmp_path, done, CHECKPOINT, ROUNDING)


def test_names_and_dtypes_that_the_format_cannot_hold_are_rejected() -> None:
    with pytest.raises(UsageError, match="which safetensors reserves; rename the tensor"):
        safetensors.header([Place("__metadata__", "float32", (1,), 0)])
    with pytest.raises(UsageError, match="tensor 'w' is string"):
        safetensors.header([Place("w", "string", (1,), 0)])
