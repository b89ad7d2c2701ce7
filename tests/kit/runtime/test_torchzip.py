"""Archives that torch writes, and archives in which torch finds other records than Python."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.torchzip import records

END = 22  # bytes of the record at the end of a zip file


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save({"a": torch.ones(4)}, tmp_path / "m.pt")
    return tmp_path / "m.pt"


def names(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return [info.filename for info in records(archive)]


def plain(path: Path, name: str, data: bytes) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, data)
    return path.read_bytes()


def test_archives_from_torch_and_from_another_writer_are_read(saved: Path) -> None:
    assert "m/data.pkl" in names(saved)
    plain(saved, "m/data.pkl", b"x")
    assert names(saved) == ["m/data.pkl"]


@pytest.mark.parametrize("twin", ["m/DATA.pkl", "m/data.pkl"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_names_that_are_the_same_for_torch_are_rejected(saved: Path, twin: str) -> None:
    with zipfile.ZipFile(saved, "w") as archive:
        archive.writestr("m/data.pkl", b"x")
        archive.writestr(twin, b"y")
    with pytest.raises(RuntimeFailure, match=f"reads its records 'm/data.pkl' and '{twin}' as the same"):
        names(saved)


def test_a_name_that_python_truncates_is_rejected(saved: Path) -> None:
    saved.write_bytes(plain(saved, "m/data.pkl#x", b"x").replace(b"pkl#x", b"pkl\0x"))
    with pytest.raises(RuntimeFailure, match=r"record 'm/data.pkl' has a second name in the archive"):
        names(saved)


def test_two_directories_are_rejected_if_torch_and_python_read_different_ones(saved: Path) -> None:
    """torch reads the first directory. Python reads the second, and shifts all records by that directory's offset."""
    first = saved.read_bytes()
    torch.save({"a": torch.zeros(4)}, saved)
    second = saved.read_bytes()
    assert len(first) == len(second)
    at = struct.unpack("<I", first[-6:-2])[0]
    size = struct.unpack("<I", first[-10:-6])[0]
    saved.write_bytes(first[: at + size] + second[: at + size] + second[-END:])
    assert torch.load(saved)["a"].tolist() == [1.0] * 4
    with zipfile.ZipFile(saved) as archive:
        assert archive.read("m/data/0") == bytes(16)
    with pytest.raises(RuntimeFailure, match=f"its zip directory begins at byte {at}, but it begins at byte"):
        names(saved)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data + b"more", "extra bytes at its end"),
        (lambda data: data[:-2] + b"\x01\x00x", "extra bytes at its end"),  # a zip comment
        (lambda data: data[:-34] + bytes(8) + data[-26:], "is not where torch writes"),
    ],
)
def test_an_end_that_torch_does_not_write_is_rejected(saved: Path, change: Callable[[bytes], bytes], said: str) -> None:
    saved.write_bytes(change(saved.read_bytes()))
    with pytest.raises(RuntimeFailure, match=said):
        names(saved)
