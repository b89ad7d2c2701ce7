"""A program as a torch module: it has the outputs and the tensor names of the module that was exported."""

from __future__ import annotations

from typing import Any

import exportedfiles as files
import numpy as np
import pytest
import torch
from architectures import Cnn, Mlp, Tied, seeded
from torch import nn

from bf16kit.messages.errors import SourceError
from bf16kit.runtime.exported.archive import read_archive
from bf16kit.runtime.exported.graph import parse_program
from converter.read.torch.program import ProgramModule


def program(module: nn.Module, *example: torch.Tensor, widened: tuple[str, ...] = ()) -> ProgramModule:
    archive = read_archive(memoryview(bytearray(files.exported(module, *example))))
    tensors = {name: np.asarray(archive.tensor(name), order="C") for name in archive.tensors}
    parameters = [name for name, stored in archive.tensors.items() if stored.is_parameter]
    return ProgramModule(parse_program(archive.program, archive.tensors), tensors, parameters, widened)


@pytest.mark.parametrize(
    ("module", "example"),
    [
        (Mlp, torch.ones(2, 16)),
        (Cnn, torch.ones(2, 3, 16, 16)),
        (Tied, torch.zeros(2, 3, dtype=torch.int64)),
    ],
)
def test_a_program_gives_the_outputs_of_the_module_bit_for_bit(module: type[nn.Module], example: torch.Tensor) -> None:
    original = seeded(module()).eval()
    with torch.inference_mode():
        assert torch.equal(program(original, example)(example)["output"], original(example))


def test_parameters_and_buffers_have_their_names() -> None:
    made = program(seeded(Cnn()), torch.ones(2, 3, 16, 16))
    assert {name for name, _ in made.held.named_parameters()} == {name for name, _ in Cnn().named_parameters()}
    assert {name for name, _ in made.held.named_buffers()} == {name for name, _ in Cnn().named_buffers()}


def test_other_precisions_are_widened_to_fp32_on_request() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = seeded(Mlp()).to(torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.core(x.to(torch.bfloat16)).to(torch.float32)
            return found

    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    made = program(Half(), torch.ones(2, 16), widened=("bfloat16",))
    expected = seeded(Mlp()).to(torch.bfloat16).float()
    with torch.inference_mode():
        assert torch.equal(made(x)["output"], expected(x))


def test_a_tensor_name_that_is_impossible_in_a_module_is_rejected() -> None:
    def edit(table: Any) -> None:
        table["config"]["forward"] = table["config"]["up.bias"]

    changed = files.changed(files.exported(Mlp(), torch.ones(2, 16)), files.WEIGHTS, edit)
    archive = read_archive(memoryview(bytearray(changed)))
    tensors = {name: archive.tensor(name) for name in archive.tensors}
    with pytest.raises(SourceError, match="tensor 'forward' has a name that is not possible in a module"):
        ProgramModule(parse_program(archive.program, archive.tensors), tensors, ())


class Normed(nn.Module):
    """Under autocast, its norm and its table would compute in bf16, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.line, self.norm = nn.Embedding(8, 16), nn.Linear(16, 16), nn.GroupNorm(4, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.line(self.table(ids)))
        return found


def test_norms_and_tables_are_fp32_under_autocast() -> None:
    made = program(seeded(Normed()), torch.zeros(2, dtype=torch.int64))
    for name, parameter in made.held.named_parameters():
        if parameter.ndim > 1 or name == "line.bias":
            parameter.data = parameter.data.to(torch.bfloat16)
    ids = torch.arange(3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = made(ids)["output"]
    assert found.dtype is torch.float32
    with torch.no_grad():
        expected = seeded(Normed())(ids)
    assert (found - expected).norm() / expected.norm() < 1e-2
