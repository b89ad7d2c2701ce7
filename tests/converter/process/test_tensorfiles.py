"""Large torch tensors are kept in files instead of memory, with the same values."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mapped import deleted_kb
from torch import nn

from bf16kit.converter.process.tensorfiles import TensorFiles
from bf16kit.converter.write.torchscript import narrowed

SIDE = 1024  # a square of fp32 is 4 MiB


def built(directory: Path | None, make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    """Return a module made with a fixed seed, and the random numbers that follow."""
    torch.manual_seed(0)
    if directory is None:
        return make(), torch.rand(4)
    with TensorFiles(directory):
        module = make()
    return module, torch.rand(4)


class Odd(nn.Module):
    """A module with custom initialisation, a tied weight, and a buffer that is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(SIDE, SIDE) * 0.02)
        self.turned = nn.Parameter(torch.randn(SIDE, 2 * SIDE).t().clone())
        self.ones = nn.Parameter(torch.ones(SIDE, SIDE), requires_grad=False)
        self.tied = self.scaled
        self.register_buffer("table", torch.rand(SIDE, SIDE), persistent=False)
        self.register_buffer("part", torch.zeros(SIDE, SIDE)[1:])


@pytest.mark.parametrize("make", [Odd, lambda: nn.LSTM(SIDE, SIDE), lambda: nn.Linear(SIDE, SIDE).half()])
def test_a_module_in_files_equals_one_in_memory_bit_for_bit(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    (plain, after), (filed, after_filed) = built(None, make), built(tmp_path, make)
    assert torch.equal(after, after_filed)
    expected, found = dict(plain.named_buffers()), dict(filed.named_buffers())
    expected |= dict(plain.named_parameters(remove_duplicate=False))
    found |= dict(filed.named_parameters(remove_duplicate=False))
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype is tensor.dtype
        assert found[name].stride() == tensor.stride()
        assert found[name].requires_grad == tensor.requires_grad
    assert deleted_kb() > 0


def test_what_shares_memory_still_does(tmp_path: Path) -> None:
    """``float()`` of an fp32 tensor is that tensor, so a write to one must change the other. Tied weights stay tied."""
    module, _ = built(tmp_path, Odd)
    assert isinstance(module, Odd)
    with torch.no_grad():
        module.scaled.fill_(3.0)
    assert module.tied[-1, -1] == 3.0
    tensor = torch.zeros(SIDE, SIDE)
    with TensorFiles(tmp_path):
        again, inside = tensor.float(), tensor[1:]
    again[0, 0] = inside[0, 0] = 1.0
    assert tensor[0, 0] == tensor[1, 0] == 1.0


def test_a_file_is_deleted_with_its_tensor(tmp_path: Path) -> None:
    before = deleted_kb()
    with TensorFiles(tmp_path):
        tensor = torch.ones(SIDE, SIDE)
        assert list(tmp_path.iterdir()) == []
    assert deleted_kb() >= before + 4 * 1024
    del tensor
    assert deleted_kb() == before


@pytest.mark.parametrize("directory", ["/dev/shm", "/nowhere"])
def test_without_a_directory_on_a_disk_tensors_stay_in_memory(directory: str) -> None:
    before = deleted_kb()
    with TensorFiles(Path(directory)):
        tensor = torch.ones(SIDE, SIDE)
    assert deleted_kb() == before
    assert tensor[-1, -1] == 1.0


def test_matrices_that_are_rounded_for_torchscript_are_in_files(tmp_path: Path) -> None:
    before = deleted_kb()
    with narrowed(nn.Linear(SIDE, SIDE), tmp_path) as module:
        assert module.get_parameter("weight").dtype is torch.bfloat16
        assert deleted_kb() >= before + 2 * 1024
    assert deleted_kb() == before
