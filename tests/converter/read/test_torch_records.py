"""Torch files whose records do not match their pickles: mapped unchecked, they would give bytes of other tensors."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bf16kit.messages.errors import SourceError
from converter.read.detect import Kind
from converter.read.torch_file import read_file

Change = Callable[[str, bytes], bytes]


def _saved(path: Path, state: dict[str, torch.Tensor]) -> Path:
    torch.save(state, path)
    return path


def _rewritten(path: Path, change: Change, method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    changed = path.with_name("changed.pt")
    with zipfile.ZipFile(changed, "w", method) as archive:
        for name, content in records.items():
            archive.writestr(name, change(name, content))
    return changed


def _read(path: Path) -> dict[str, Any]:
    return {name: array.tolist() for name, array in read_file(path, Kind.TORCH_ZIP, trust_code=False)[0].items()}


STATE = {"a": torch.arange(4.0), "b": torch.arange(100.0), "none": torch.zeros(0)}


def test_an_uncompressed_archive_of_another_zip_writer_is_read(tmp_path: Path) -> None:
    path = _rewritten(_saved(tmp_path / "m.pt", STATE), lambda name, content: content)
    assert _read(path) == {name: tensor.tolist() for name, tensor in STATE.items()}


@pytest.mark.parametrize("record", ["/data.pkl", "/data/0"])
def test_a_record_that_extends_beyond_the_end_of_the_file_is_rejected(tmp_path: Path, record: str) -> None:
    """zipfile raises EOFError for it, which click would treat as an interruption."""
    path = _saved(tmp_path / "m.pt", STATE)
    data = bytearray(path.read_bytes())
    at = data.rindex(record.encode())  # its name in the directory, behind 46 bytes of fields
    start = data.rindex(b"PK\x01\x02", 0, at)
    data[start + 20 : start + 28] = struct.pack("<II", 1 << 20, 1 << 20)
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"m\.pt: "):
        _read(path)


def test_views_of_one_storage_are_read(tmp_path: Path) -> None:
    whole = torch.arange(20.0)
    read = _read(_saved(tmp_path / "m.pt", {"a": whole[3:7], "b": whole.view(4, 5).T}))
    assert read == {"a": [3.0, 4.0, 5.0, 6.0], "b": whole.view(4, 5).T.tolist()}


@pytest.mark.parametrize("record", ["/data/0", "/data/1"])
@pytest.mark.parametrize("change", [lambda data: data[:-4], lambda data: data + bytes(4), lambda data: b""])
def test_a_record_of_another_length_than_its_tensor_is_rejected(
    tmp_path: Path, record: str, change: Callable[[bytes], bytes]
) -> None:
    path = _saved(tmp_path / "m.pt", STATE)
    changed = _rewritten(path, lambda name, content: change(content) if name.endswith(record) else content)
    with pytest.raises(SourceError, match=r"changed\.pt: "):
        _read(changed)


def test_compressed_records_are_rejected_and_not_read_as_tensors(tmp_path: Path) -> None:
    path = _rewritten(_saved(tmp_path / "m.pt", STATE), lambda name, content: content, zipfile.ZIP_DEFLATED)
    with pytest.raises(SourceError, match="is compressed, which torch never does"):
        _read(path)


def test_a_compressed_record_is_rejected_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a zip bomb: torch would search the gigabytes that it unpacks to for names."""
    saved = _saved(tmp_path / "a.pt", STATE)
    bomb = _rewritten(saved, lambda _, content: content, zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch was asked to load it"))
    with pytest.raises(SourceError, match="is compressed, which torch never does"):
        _read(bomb)
