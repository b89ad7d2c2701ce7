"""Samples packed for another process."""

from __future__ import annotations

import fcntl
import json
import os

import ml_dtypes
import numpy as np
import pytest

from service.drift.sampler import Sample
from service.shadow.samples import pack, unpack

SAMPLE = Sample(
    feeds={
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "text": np.array([["a", "é"], ["", "b"]], np.object_),
        "mask": np.array([True, False]),
        "empty": np.zeros((2, 0), np.int64),
    },
    outputs={"y": np.array([1.5, -2.0]).astype(ml_dtypes.bfloat16), "z": np.array(3, np.float32)},
    rows=2,
    nbytes=99,
    probability=1 / 3,
    precision="bf16",
    profile="cpu-bf16",
)


def test_a_sample_is_unchanged_by_packing_and_unpacking() -> None:
    other = Sample({"x": np.ones(1)}, {"y": np.zeros(1)}, rows=1, nbytes=1)
    description, file = pack([other, SAMPLE])
    first, found = unpack(json.loads(json.dumps(description)), file)
    os.close(file)
    assert description["nbytes"] == 100
    np.testing.assert_array_equal(first.feeds["x"], other.feeds["x"])
    assert (found.rows, found.nbytes) == (2, 99)
    assert (found.probability, found.precision, found.profile) == (1 / 3, "bf16", "cpu-bf16")
    for kind in ("feeds", "outputs"):
        there, here = getattr(found, kind), getattr(SAMPLE, kind)
        assert there.keys() == here.keys()
        for name, array in here.items():
            assert there[name].dtype == array.dtype, name
            assert there[name].shape == array.shape, name
            if name == "text":
                assert [_text(each) for each in there[name].flat] == [_text(each) for each in array.flat]
            else:
                np.testing.assert_array_equal(there[name], array)


def _text(element: str | bytes) -> bytes:
    return element if isinstance(element, bytes) else element.encode()


def test_the_file_cannot_be_changed_while_it_is_read() -> None:
    _, file = pack([SAMPLE])
    with pytest.raises(PermissionError):
        os.truncate(file, 0)
    with pytest.raises(PermissionError):
        os.pwrite(file, b"x", 0)
    assert fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    os.close(file)


def test_a_file_that_does_not_match_its_description_is_rejected() -> None:
    description, file = pack([SAMPLE])
    description["samples"][0]["tensors"].pop()
    with pytest.raises(ValueError, match="are described as"):
        unpack(description, file)
    os.close(file)
