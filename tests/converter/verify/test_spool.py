"""Outputs stored on disk are read back unchanged, and no file is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from bf16kit.runtime.memory.scratch import on_disk
from converter.verify.spool import Spool


def test_outputs_are_read_back_bit_for_bit(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    answers = [
        {
            "floats": random.standard_normal((3, rows, 5)).astype(np.float32),
            "nan": np.array([np.nan, np.inf, -0.0], np.float32),
            "bf16": random.standard_normal((rows, 2)).astype(ml_dtypes.bfloat16),
            "counts": np.arange(rows, dtype=np.int64),
            "scalar": np.array(rows, np.float64),
            "none": np.empty((0, 4), np.float32),
            "turned": random.standard_normal((2, 7)).astype(np.float32).T,
            "words": np.array(["a", "bc"], np.object_),
        }
        for rows in (1, 5000)
    ]
    spool = Spool(tmp_path)
    for answer in answers:
        spool.append(answer)
    assert len(spool) == 2
    for expected, found in zip(answers, spool, strict=True):
        assert list(found) == list(expected)
        for name, array in expected.items():
            assert found[name].dtype == array.dtype
            assert found[name].shape == array.shape
            assert found[name].tobytes() == array.tobytes() or np.array_equal(found[name], array)
    assert np.array_equal(spool[-1]["counts"], answers[1]["counts"])
    assert [int(answer["scalar"]) for answer in spool[:1]] == [1]


def test_stored_outputs_are_read_only(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append({"y": np.ones(4, np.float32)})
    with pytest.raises(ValueError, match="read-only"):
        spool[0]["y"][0] = 2


def test_the_file_has_no_name_so_that_it_cannot_be_left_behind(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append({"y": np.ones(1 << 20, np.float32)})
    assert list(tmp_path.iterdir()) == []
    kept = spool[0]["y"]
    spool.close()
    assert kept.sum() == 1 << 20


def test_a_full_disk_is_an_os_error() -> None:
    spool = Spool()
    with Path("/dev/full").open("w+b", buffering=0) as full:
        spool._file = full
        with pytest.raises(OSError, match="No space left"):
            spool.append({"y": np.ones(4, np.float32)})


def test_a_directory_in_memory_is_not_used() -> None:
    shared = Path("/dev/shm")
    spool = Spool(shared)
    spool.append({"y": np.ones(3, np.float32)})
    there = os.fstat(spool._file.fileno()).st_dev
    spool.close()
    assert there == on_disk(shared).stat().st_dev
    assert on_disk(shared) == shared or there != shared.stat().st_dev
