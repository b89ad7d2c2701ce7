import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load, save

from bf16kit.artifact.evidence import KEY, Evidence, Header
from bf16kit.messages.errors import UsageError

HEADER = Header(
    model="m", version=3, at="2026-01-01T00:00:00+00:00", profile="cpu", precision="bf16-weights",
    rows=1, of_rows=4, batch_axis=0, budget={"relative_l2": 0.015},
    drift={"y": {"relative_l2": math.inf, "max_abs": 2.0}}, verdict={"state": "over", "cause": "broken"},
    files={"cpu.onnx": "ab" * 32}, versions={"bf16kit": "1"},
)  # fmt: skip


def evidence() -> Evidence:
    feeds = {
        "x": np.arange(6, dtype=np.float32).reshape(1, 6)[:, ::2],  # not contiguous
        "words": np.array([["naïve", ""]], np.object_),
        "narrow": np.array([[1.5, -2.0]], ml_dtypes.bfloat16),
        "yes": np.array([[True]]),
        "ids": np.array([[7]], np.int64),
        "scalar": np.array(2.5, np.float64),
    }
    answers = {"y": np.array([[np.nan, np.inf, 1.0]], np.float32)}
    return Evidence(HEADER, feeds, answers, {"y": np.zeros((1, 3), np.float32)})


def test_every_dtype_is_read_as_it_was_written(tmp_path: Path) -> None:
    """The file is safetensors, which other programs read, too."""
    written = evidence()
    (tmp_path / "e").write_bytes(written.dumps())
    assert load(written.dumps())["input:narrow"].dtype == np.uint16
    found = Evidence.read(tmp_path / "e")
    assert found.header.model_copy(update={"tensors": {}}) == written.header
    for part in ("feeds", "served", "reference"):
        arrays, before = getattr(found, part), getattr(written, part)
        assert arrays.keys() == before.keys()
        for name, array in arrays.items():
            assert (array.dtype, array.shape) == (before[name].dtype, before[name].shape), name
            np.testing.assert_array_equal(array, before[name])


WHOLE = evidence().dumps()
METADATA: dict[str, str] = json.loads(WHOLE[8 : 8 + int.from_bytes(WHOLE[:8], "little")])["__metadata__"]
TOLD: dict[str, Any] = json.loads(METADATA[KEY])


def other(change: dict[str, Any]) -> bytes:
    """Return the same file with ``change`` applied to its header."""
    return save(load(WHOLE), {KEY: json.dumps(TOLD | change)})


NULL = b'{"__metadata__":null}'
DEEP = "[" * 100_000 + "]" * 100_000  # nested deeper than Python's parser allows


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not evidence, or is damaged"),
        (b"PK\x03\x04 a zip file of some length", "is not evidence, or is damaged"),
        (WHOLE[:-1], "is not evidence, or is damaged"),
        (save({"x": np.zeros(1, np.float32)}), "a safetensors file, but not evidence"),
        (save({"x": np.zeros(1, np.float32)}, {KEY: "not JSON"}), "has a header that this bf16kit cannot read"),
        (save({"x": np.zeros(1, np.float32)}, {KEY: DEEP}), "has a header that this bf16kit cannot read"),
        (len(NULL).to_bytes(8, "little") + NULL, "a safetensors file, but not evidence"),
        (other({"format": 2}), "this bf16kit cannot read: format: Input should be 1"),
        (other({"surprise": 1}), "this bf16kit cannot read: surprise: Extra"),
        (other({"tensors": {}}), "are not of the same outputs"),
    ],
)
def test_a_file_that_is_not_evidence_is_reported_in_one_line(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "e").write_bytes(data)
    with pytest.raises(UsageError) as told:
        Evidence.read(tmp_path / "e")
    assert str(told.value).startswith(f"{tmp_path / 'e'}: ")
    assert words in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("input:x", {"dtype": "float64", "shape": [1, 3]}),
        ("input:x", {"dtype": "complex", "shape": [1, 3]}),
        ("input:words", {"dtype": "string", "shape": [1, 3]}),
        ("another:x", {"dtype": "float32", "shape": [1, 3]}),
        ("input:absent", {"dtype": "float32", "shape": [1, 3]}),
    ],
)
def test_tensors_that_do_not_match_the_header_are_rejected(key: str, changed: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"'{key}' is not what its header says: fetch it again"):
        Evidence.loads(other({"tensors": TOLD["tensors"] | {key: changed}}), "e")


def test_invalid_strings_and_different_outputs_are_reported_without_their_content() -> None:
    for stored in (DEEP.encode(), b'["a secret", 7]', b'{"a secret": 1, "b": 2}', b"7", b"\xff"):
        data = save(load(WHOLE) | {"input:words": np.frombuffer(stored, np.uint8)}, METADATA)
        with pytest.raises(UsageError, match=r"^e: 'input:words' is not what its header says: fetch it again$"):
            Evidence.loads(data, "e")
    found = evidence()
    for served, reference in ((found.served, {}), ({}, {}), (found.served, {"y": np.zeros((1, 3), np.float64)})):
        with pytest.raises(UsageError, match="not of the same outputs"):
            Evidence.loads(Evidence(found.header, found.feeds, served, reference).dumps(), "e")
