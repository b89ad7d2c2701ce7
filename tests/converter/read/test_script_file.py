"""TorchScript files: the tensors that they hold, and files that are rejected."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import Cnn, Mlp, Tied, seeded
from scriptedmodels import How, Named, Recurrent, save

from bf16kit.messages.errors import SourceError
from converter.read import script_file

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's own

HOWS: tuple[How, ...] = ("scripted", "traced", "frozen")


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    return save(tmp_path / "m.pt", Mlp(), torch.ones(2, 16))


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


@pytest.mark.parametrize("share", [0.3, 0.7, 0.999])
def test_a_truncated_file_is_rejected(mlp: Path, share: float) -> None:
    whole = mlp.read_bytes()
    mlp.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(SourceError, match=r"m\.pt: is a truncated or damaged zip archive"):
        script_file.load(mlp)


def test_a_changed_byte_of_a_weight_is_noticed(mlp: Path) -> None:
    with zipfile.ZipFile(mlp) as archive:
        weight = archive.read("m/data/0")
    mlp.write_bytes(mlp.read_bytes().replace(weight, b"\x01" + weight[1:]))
    with pytest.raises(SourceError, match=r"m\.pt: damaged: its record 'm/data/0' has other bytes than were written"):
        script_file.load(mlp)


def test_a_module_without_forward_is_rejected(tmp_path: Path) -> None:
    class Empty(torch.nn.Module):
        @torch.jit.export
        def backward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    scripted: Any = torch.jit.script(Empty())
    torch.jit.save(scripted, tmp_path / "m.pt")
    with pytest.raises(SourceError, match=r"m\.pt: TorchScript cannot load m\.pt: .*forward"):
        script_file.load(tmp_path / "m.pt")


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
