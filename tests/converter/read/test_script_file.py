"""TorchScript files: their content is checked before torch loads them, and their operators before they run."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import Cnn, Mlp, Tied, seeded
from deepscript import doubling, with_code
from scriptedmodels import How, Named, Recurrent, save

from bf16kit.messages.errors import SourceError
from converter.read import script_file

HOWS: tuple[How, ...] = ("scripted", "traced", "frozen")
Change = Callable[[str, bytes], bytes]


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    return save(tmp_path / "m.pt", Mlp(), torch.ones(2, 16))


def _rewritten(path: Path, change: Change, deflated: str = "") -> Path:
    """Apply ``change`` to all records of ``path``; compress those with ``deflated`` in the name. Return ``path``."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            packed = zipfile.ZIP_DEFLATED if deflated and deflated in name else zipfile.ZIP_STORED
            archive.writestr(zipfile.ZipInfo(name), change(name, data), packed)
    return path


def _with_code(path: Path, old: str, new: str) -> Path:
    """Replace a piece of the code of the Mlp in ``path``; return ``path``."""

    def change(name: str, data: bytes) -> bytes:
        if b"class Mlp(" not in data:
            return data
        assert old in data.decode()
        return data.decode().replace(old, new, 1).encode()

    return _rewritten(path, change)


@pytest.mark.parametrize("how", HOWS)
def test_every_tensor_is_found_bit_for_bit(tmp_path: Path, how: How) -> None:
    path = save(tmp_path / "m.pt", Cnn(), torch.ones(2, 3, 16, 16), how)
    found = script_file.arrays(path, script_file.tensors(script_file.load(path)))
    state = {name: tensor.numpy() for name, tensor in seeded(Cnn()).state_dict().items()}
    if how != "frozen":
        assert found.keys() == state.keys()
        for name, array in state.items():
            np.testing.assert_array_equal(found[name], array)
    else:  # BatchNorm is folded by torch.jit.freeze itself
        assert sorted(found) == [f"constants.{number}" for number in range(len(found))]
        assert any(np.array_equal(array, state["head.weight"]) for array in found.values())


def test_a_shared_weight_has_both_names_and_an_attribute_its_own_name(tmp_path: Path) -> None:
    path = save(tmp_path / "m.pt", Named(), (torch.ones(2, 16), torch.ones(2, 16)))
    found = script_file.tensors(script_file.load(path))
    assert set(found) == {"left.weight", "left.bias", "right.weight", "right.bias", "shift"}
    assert found["left.weight"].data_ptr() == found["right.weight"].data_ptr()


def test_a_list_of_parameters_adds_no_tensors(tmp_path: Path) -> None:
    """Recurrent layers have such a list beside the parameters in it."""
    script = script_file.load(save(tmp_path / "m.pt", Recurrent(), torch.ones(2, 7, 16)))
    assert script_file.tensors(script).keys() == script.state_dict().keys()


def test_a_constant_that_two_places_use_is_one_tensor(tmp_path: Path) -> None:
    path = save(tmp_path / "m.pt", Tied(), torch.zeros(2, 3, dtype=torch.long), "frozen")
    assert sorted(tensor.ndim for tensor in script_file.tensors(script_file.load(path)).values()) == [1, 2, 2]


# --- rejected before torch loads it -----------------------------------------------------------------------------------


def test_code_that_would_do_more_than_compute_is_rejected_and_not_loaded(
    mlp: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    body = "    up = self.up\n"
    said = r"m\.pt: its code in 'm/code/[^']*' has the word 'save', which writes files .*; bf16kit cannot"
    with pytest.raises(SourceError, match=said):
        script_file.load(_with_code(mlp, body, f'{body}    torch.save([1], "executed")\n'))
    assert not (tmp_path / "executed").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_runs_default_values_while_it_loads_a_file(
    mlp: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Therefore the code is checked as text first: torch creates the file while it loads the module."""
    monkeypatch.chdir(tmp_path)
    path = _with_code(mlp, "x: Tensor) ->", 'x: Tensor, y: Tensor=torch.from_file("executed", True, 4)) ->')
    torch.jit.load(str(path))  # type: ignore[no-untyped-call]  # torch's own
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("renamed", [str.upper, lambda name: name.replace(".py", ".Py"), lambda name: name[1:]])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_code_is_found_under_every_record_name_that_torch_accepts(
    mlp: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, renamed: Callable[[str], str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = _with_code(mlp, "x: Tensor) ->", 'x: Tensor, y: Tensor=torch.from_file("executed", True, 4)) ->')
    with zipfile.ZipFile(path) as archive:
        read = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in read.items():
            archive.writestr(renamed(name), data)
    with pytest.raises(SourceError, match="has the word 'from_file', which reads files"):
        script_file.load(path)
    assert not (tmp_path / "executed").exists()
    torch.jit.load(str(path))  # type: ignore[no-untyped-call]  # torch's own
    assert (tmp_path / "executed").exists()


def test_attribute_names_that_are_not_identifiers_are_accepted(tmp_path: Path) -> None:
    path = save(tmp_path / "m.pt", Cnn(), torch.ones(2, 3, 16, 16))
    with zipfile.ZipFile(path) as archive:
        code = b"".join(archive.read(name) for name in archive.namelist() if "/code/" in name)
    assert b'getattr(self, "0")' in code
    script_file.check(path)


@pytest.mark.parametrize("share", [0.3, 0.7, 0.999])
def test_a_truncated_file_is_rejected(mlp: Path, share: float) -> None:
    whole = mlp.read_bytes()
    mlp.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(SourceError, match=r"m\.pt: "):
        script_file.check(mlp)


def test_compressed_weights_are_rejected(mlp: Path) -> None:
    with pytest.raises(SourceError, match=r"record 'm/data/0' is compressed, which torch never does"):
        script_file.check(_rewritten(mlp, lambda name, data: data, deflated="/data/"))


def test_compressed_code_is_accepted_up_to_a_limit(mlp: Path) -> None:
    script_file.check(_rewritten(mlp, lambda name, data: data, deflated="/code/"))
    spaces = b" " * (70 << 20)
    bomb = _rewritten(mlp, lambda name, data: data + spaces if b"class Mlp(" in data else data, "/code/")
    assert bomb.stat().st_size < 1 << 20
    with pytest.raises(SourceError, match=r"has \d+ bytes of code, expected at most 16777216"):
        script_file.check(bomb)


def test_a_record_that_is_shorter_than_its_tensor_is_rejected(mlp: Path) -> None:
    with pytest.raises(SourceError, match=r"takes 4096 bytes from record .*, which has 4092"):
        script_file.check(_rewritten(mlp, lambda name, data: data[:-4] if name.endswith("/data/0") else data))


@pytest.mark.parametrize(
    ("pickle", "said"),
    [
        (b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".", "holds a list, expected a module"),
        (b"\x80\x02c__torch__\nM\n)\x81" + b"]" * 9_000 + b"a" * 8_999 + b"b.", "nests values more than"),
    ],
)
def test_deeply_nested_values_are_rejected_before_torch_reads_them(mlp: Path, pickle: bytes, said: str) -> None:
    with pytest.raises(SourceError, match=said):
        script_file.check(_rewritten(mlp, lambda name, data: pickle if name.endswith("/data.pkl") else data))


# --- rejected before it runs ------------------------------------------------------------------------------------------


def test_code_that_inlining_would_multiply_is_rejected(tmp_path: Path) -> None:
    path = with_code(tmp_path / "m.pt", doubling(40), "__torch__.f40(input)")
    with pytest.raises(
        SourceError, match=r"m\.pt: its code has more than 500000 operations once its calls are inlined"
    ):
        script_file.load(path)


def test_a_module_without_forward_is_rejected(mlp: Path) -> None:
    with pytest.raises(SourceError, match="torch cannot load it"):
        script_file.load(_with_code(mlp, "def forward(", "def backward("))


def _of_its_sum(x: torch.Tensor) -> torch.Tensor:
    return -x if bool(x.sum() > 0) else x


def _of_its_size(x: torch.Tensor) -> torch.Tensor:
    return -x if x.size(0) > 2 else x


def _by_its_size(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(int(x.size(0) * x.size(1)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("made", "decides"),
    [
        (lambda: torch.jit.script(_of_its_sum), True),
        (lambda: torch.jit.script(_of_its_size), False),
        (lambda: torch.jit.trace(_by_its_size, torch.ones(2, 3)), False),  # type: ignore[no-untyped-call]  # sizes are tensors
    ],
)
def test_decisions_by_numbers_and_by_sizes_are_distinguished(made: Callable[[], Any], decides: bool) -> None:
    assert script_file.decides_by_numbers(made()) is decides
