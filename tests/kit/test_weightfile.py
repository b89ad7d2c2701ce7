"""Weight files: aligned, and in C order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bf16kit.artifact.manifest import Segment
from bf16kit.artifact.weightfile import WeightWriter
from bf16kit.numerics.rounding import BF16


def test_each_tensor_starts_at_a_multiple_of_64_with_zeros_between(tmp_path: Path) -> None:
    with WeightWriter(tmp_path / "w") as writer:
        assert writer.append(np.array([1, 2], np.uint8)) == Segment(offset=0, bytes=2)
        assert writer.append(np.array([3], np.uint8)) == Segment(offset=64, bytes=1)
    assert (tmp_path / "w").read_bytes() == b"\1\2" + bytes(62) + b"\3"


@pytest.mark.parametrize(
    "array",
    [
        np.array(1.5, BF16),
        np.zeros((0, 3), np.float32),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.arange(3, dtype=">i8"),
        np.array([True, False]),
        np.ones(3 << 18, np.float64),  # more than one piece
    ],
    ids=["scalar", "empty", "transposed", "big-endian", "bool", "large"],
)
def test_any_array_is_written_little_endian_in_c_order(tmp_path: Path, array: NDArray[Any]) -> None:
    with WeightWriter(tmp_path / "w") as writer:
        writer.append(array)
    data = np.frombuffer((tmp_path / "w").read_bytes(), array.dtype.newbyteorder("<"))
    assert np.array_equal(data.reshape(array.shape), array)


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "w").touch()
    with pytest.raises(FileExistsError):
        WeightWriter(tmp_path / "w")
