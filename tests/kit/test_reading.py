from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bf16kit.entries import Segment
from bf16kit.errors import ArtifactDamaged
from bf16kit.reading import read_segment


def test_a_segment_is_read_where_it_is_wanted(tmp_path: Path) -> None:
    file = tmp_path / "weights.bf16"
    file.write_bytes(bytes(range(100)))
    assert read_segment(file, Segment(offset=10, bytes=5)).tolist() == [10, 11, 12, 13, 14]
    place = np.zeros(7, np.uint8)
    read_segment(file, Segment(offset=97, bytes=3), place[2:5])
    assert place.tolist() == [0, 0, 97, 98, 99, 0, 0]


def test_a_file_that_ends_before_it_or_is_gone_is_damaged(tmp_path: Path) -> None:
    file = tmp_path / "weights.bf16"
    file.write_bytes(bytes(100))
    with pytest.raises(ArtifactDamaged, match=r"weights\.bf16: cut short to 100 bytes while it was read"):
        read_segment(file, Segment(offset=90, bytes=11))
    with pytest.raises(ArtifactDamaged, match=r"gone: missing or unreadable \(No such file"):
        read_segment(tmp_path / "gone", Segment(offset=0, bytes=1))
