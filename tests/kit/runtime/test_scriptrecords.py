from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.scriptrecords import check


class Layer(torch.nn.Module):
    """A module with weights of three dtypes, a constant, and attributes of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8).to(torch.bfloat16)
        self.steps: torch.Tensor
        self.empty: torch.Tensor
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("empty", torch.empty(0, 4))
        self.names = {"a": [1, 2]}
        self.pair = (1, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x.to(torch.bfloat16)).float() + float(self.names["a"][0]) * self.pair[1]
        return torch.relu(y) + torch.ones(8, dtype=torch.float64).float() + self.steps[0].float() + self.empty.sum()


@pytest.fixture(params=["scripted", "traced", "frozen"])
def module(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    layer, path = Layer().eval(), tmp_path / "model.torchscript.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        made: Any = torch.jit.trace(layer, torch.ones(2, 8)) if request.param == "traced" else torch.jit.script(layer)  # type: ignore[no-untyped-call]
        torch.jit.save(torch.jit.freeze(made) if request.param == "frozen" else made, path)
    return path


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """Replace each record by what ``change`` returns, or drop it if that is None. Return ``path``."""
    archive = zipfile.ZipFile(path)
    records = {name: change(name.partition("/")[2], archive.read(name)) for name in archive.namelist()}
    archive.close()
    with zipfile.ZipFile(path, "w") as changed:
        for name, data in records.items():
            if data is not None:
                changed.writestr(name, data)
    return path


def test_a_file_that_torch_wrote_passes_and_a_truncated_weight_does_not(module: Path) -> None:
    check(module)
    weight = rewritten(module, lambda name, data: data[:-1] if len(data) == 128 else data)
    with pytest.raises(RuntimeFailure, match=r"torchscript\.pt: .*takes 128 bytes from record .*, which has 127"):
        check(weight)


def test_a_pickle_and_records_are_found_in_upper_case_as_by_torch(module: Path) -> None:
    with zipfile.ZipFile(module) as archive:
        read = {name.upper(): archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(module, "w") as archive:
        for name, data in read.items():
            archive.writestr(name, data)
    check(module)
    rewritten(module, lambda name, data: data[:-1] if len(data) == 128 else data)
    with pytest.raises(RuntimeFailure, match=r"takes 128 bytes from record .*, which has 127"):
        check(module)


def test_a_missing_record_is_named_in_the_error(module: Path) -> None:
    rewritten(module, lambda name, data: None if len(data) == 128 else data)
    with pytest.raises(RuntimeFailure, match=r"takes a tensor from record .*, which is not there"):
        check(module)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (b"\x80\x02(X\x00\x00\x00\x00tQ.", "values to unpack"),
        (b"\x80\x02r\xff\xff\xff\x7f", "list index out of range"),  # would take 17 GB in the memo of the unpickler in C
        (b"", "EOFError"),
    ],
)
def test_a_damaged_pickle_is_an_error(tmp_path: Path, record: bytes, said: str) -> None:
    path = tmp_path / "m.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data.pkl", record)
    with pytest.raises(RuntimeFailure, match=rf"cannot load m\.pt: .*({said})"):
        check(path)


class Canary:
    """An object that creates the file ``executed`` in the working directory when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


def test_a_pickle_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "m.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data.pkl", pickle.dumps(Canary(), 2))
    check(path)
    assert list(tmp_path.iterdir()) == [path]


def test_the_former_format_and_files_that_are_no_archive_are_rejected(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("m/model.json", "{}")
    (tmp_path / "m.pt").write_bytes(buffer.getvalue())
    with pytest.raises(RuntimeFailure, match="torch abandoned its format in 2019"):
        check(tmp_path / "m.pt")
    (tmp_path / "m.pt").write_bytes(b"nothing of the kind")
    with pytest.raises(RuntimeFailure, match=r"cannot load m\.pt: File is not a zip file"):
        check(tmp_path / "m.pt")
