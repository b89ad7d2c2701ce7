"""Archives in which torch finds other records than Python, and what torch itself writes."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bf16kit.errors import RuntimeFailure
from bf16kit.runtime.torchzip import records

END = 22  # bytes of a zip file's end


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


def test_what_torch_writes_and_what_another_writer_does(saved: Path) -> None:
    assert "m/data.pkl" in names(saved)
    plain(saved, "m/data.pkl", b"x")
    assert names(saved) == ["m/data.pkl"]


@pytest.mark.parametrize("twin", ["m/DATA.pkl", "m/data.pkl"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_names_that_are_one_to_torch(saved: Path, twin: str) -> None:
    with zipfile.ZipFile(saved, "w") as archive:
        archive.writestr("m/data.pkl", b"x")
        archive.writestr(twin, b"y")
    with pytest.raises(RuntimeFailure, match=f"reads its records 'm/data.pkl' and '{twin}' as the same"):
        names(saved)


def test_a_name_that_python_cuts(saved: Path) -> None:
    saved.write_bytes(plain(saved, "m/data.pkl#x", b"x").replace(b"pkl#x", b"pkl\0x"))
    with pytest.raises(RuntimeFailure, match=r"record 'm/data.pkl' has a second name in the archive"):
        names(saved)


def test_two_directories_of_which_torch_reads_the_first_and_python_the_second(saved: Path) -> None:
    """torch is seen to read the first; Python moves each record by as much as its directory is off."""
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
        (lambda data: data[:-2] + b"\x01\x00x", "extra bytes at its end"),  # a comment
        (lambda data: data[:-34] + bytes(8) + data[-26:], "is not where torch writes"),
    ],
)
def test_an_end_that_torch_does_not_write(saved: Path, change: Callable[[bytes], bytes], said: str) -> None:
    saved.write_bytes(change(saved.read_bytes()))
    with pytest.raises(RuntimeFailure, match=said):
        names(saved)
