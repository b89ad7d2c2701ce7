"""Torch's files: their tensors are read, and their pickles do not run unless the user trusts them."""

import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from bf16kit.converter.read.detect import Kind, recognise
from bf16kit.converter.read.torch_file import read_file
from bf16kit.messages.errors import SourceError


class Payload:
    """Creates the directory ``path`` when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _saved(path: Path, what: object) -> Path:
    torch.save(what, path)
    return path


def _read(path: Path, *, trust: bool = False) -> dict[str, Any]:
    return read_file(path, recognise(path), trust_code=trust)[0]


def test_every_dtype_is_read_bit_for_bit(tmp_path: Path) -> None:
    state = {
        "w": torch.randn(3, 4),
        "brain": torch.randn(5).to(torch.bfloat16),
        "half": torch.randn(5).half(),
        "double": torch.randn(5).double(),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "transposed": torch.randn(3, 4).T,
    }
    read = _read(_saved(tmp_path / "m.pt", state))
    assert list(read) == list(state)
    assert read["brain"].dtype == ml_dtypes.bfloat16
    for name, tensor in state.items():
        bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert read[name].tobytes() == bits, name
        assert list(read[name].shape) == list(tensor.shape)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_checkpoints_of_training_loops_hold_the_state_dict_under_a_key(tmp_path: Path, key: str) -> None:
    """Numbers and text beside the tensors are ignored."""
    saved = {"epoch": 3, key: {"w": torch.ones(2), "name": "x", "rate": 0.1}, "optimizer": {"lr": 0.1}}
    assert list(_read(_saved(tmp_path / "m.ckpt", saved))) == ["w"]


def test_a_pickle_that_would_run_code_is_rejected_and_not_run(tmp_path: Path) -> None:
    path = _saved(tmp_path / "m.pt", {"w": torch.ones(2), "x": Payload(tmp_path / "executed")})
    with pytest.raises(SourceError, match=r"holds more than tensors \(posix.mkdir\).*--trust-code"):
        _read(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(("protocol", "said"), [(5, r"bare pickle.*--trust-code"), (0, "text file")])
def test_a_bare_pickle_is_not_loaded_at_all(tmp_path: Path, protocol: int, said: str) -> None:
    """Protocol 0 is text, and nothing marks it as a pickle."""
    (tmp_path / "m.pt").write_bytes(pickle.dumps(Payload(tmp_path / "executed"), protocol=protocol))
    with pytest.raises(SourceError, match=said):
        _read(tmp_path / "m.pt")
    assert not (tmp_path / "executed").exists()


def test_torchs_legacy_format_is_read_if_it_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"w": torch.arange(3.0)}, path, _use_new_zipfile_serialization=False)
    assert recognise(path) is Kind.PICKLE
    assert _read(path, trust=True)["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ([torch.ones(2)], "holds a list, expected a state dict"),
        ({}, "holds no tensors at its top level, nor under 'state_dict'; it has nothing"),
        ({"w": torch.ones(2, dtype=torch.cfloat)}, r"tensor 'w' is complex \(complex64\); keep torch.view_as_real"),
        ({"w": torch.ones(2, 2).to_sparse()}, r"tensor 'w' is sparse \(torch.sparse_coo\); make it dense"),
        ({"w": torch.ones(2, device="meta")}, "tensor 'w' .*meta"),
    ],
)
def test_files_without_a_state_dict_of_plain_tensors_are_rejected(tmp_path: Path, what: object, said: str) -> None:
    with pytest.raises(SourceError, match=said):
        _read(_saved(tmp_path / "m.pt", what))


@pytest.mark.parametrize("share", [0.3, 0.999])
def test_a_truncated_archive_is_rejected(tmp_path: Path, share: float) -> None:
    whole = _saved(tmp_path / "m.pt", {"w": torch.ones(500)}).read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(SourceError, match="truncated or damaged zip archive"):
        _read(tmp_path / "cut.pt")


def test_the_file_is_mapped_and_never_written(tmp_path: Path) -> None:
    path = _saved(tmp_path / "m.pt", {"w": torch.ones(500)})
    before = path.read_bytes()
    read = _read(path)["w"]
    np.copyto(read, 5)
    assert path.read_bytes() == before


Change = Callable[[str, bytes], bytes]


def _rewritten(path: Path, change: Change, method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    changed = path.with_name("changed.pt")
    with zipfile.ZipFile(changed, "w", method) as archive:
        for name, content in records.items():
            archive.writestr(name, change(name, content))
    return changed


def _values(path: Path) -> dict[str, Any]:
    return {name: array.tolist() for name, array in read_file(path, Kind.TORCH_ZIP, trust_code=False)[0].items()}


STATE = {"a": torch.arange(4.0), "b": torch.arange(100.0), "none": torch.zeros(0)}


def test_an_uncompressed_archive_of_another_zip_writer_and_views_of_one_storage_are_read(tmp_path: Path) -> None:
    whole = torch.arange(20.0)
    state = STATE | {"part": whole[3:7], "turned": whole.view(4, 5).T}
    path = _rewritten(_saved(tmp_path / "m.pt", state), lambda name, content: content)
    assert _values(path) == {name: tensor.tolist() for name, tensor in state.items()}


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
        _values(path)


@pytest.mark.parametrize("change", [lambda data: data[:-4], lambda data: data + bytes(4), lambda data: b""])
def test_a_record_that_is_shorter_or_longer_is_rejected(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = _saved(tmp_path / "m.pt", STATE)
    changed = _rewritten(path, lambda name, content: change(content) if name.endswith("/data/1") else content)
    with pytest.raises(SourceError, match=r"changed\.pt: "):
        _values(changed)


def test_an_expanded_tensor_gets_no_more_memory_than_weights_can_need(tmp_path: Path) -> None:
    """It is one number in the file, and claims a terabyte."""
    small, huge = torch.ones(1, 1).expand(64, 3), torch.ones(1, 1).expand(1 << 38, 1)
    assert _read(_saved(tmp_path / "a.pt", {"w": small}))["w"].shape == (64, 3)
    with pytest.raises(SourceError, match=r"damaged: its tensors claim 1\.1 TB, but its files have 1"):
        _read(_saved(tmp_path / "b.pt", {"w": huge}))


def test_a_compressed_record_is_rejected_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a zip bomb: torch would search the gigabytes that it unpacks to for names."""
    saved = _saved(tmp_path / "a.pt", STATE)
    bomb = _rewritten(saved, lambda _, content: content, zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch was asked to load it"))
    with pytest.raises(SourceError, match="is compressed, which torch never does"):
        _read(bomb)
