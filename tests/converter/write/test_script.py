"""A TorchScript module narrowed in its own graph: weights of products in bf16, all else unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import Cnn, Mlp
from scriptedmodels import Deciding, Encoder, How, save
from torch import nn

from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import scriptgraph
from bf16kit.runtime.torchscript import TorchScriptRuntime
from converter.read import scripted
from converter.write.script import narrow_script

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit raises it itself

IDS = TensorSpec("ids", "int64", ("batch", "seq"))
X = TensorSpec("x", "float32", ("batch", 16))
OUTPUT = TensorSpec("output", "float32", ("batch", "any"))


def _tensors(path: Path) -> list[torch.Tensor]:
    module: Any = torch.jit.load(str(path))  # type: ignore[no-untyped-call]  # torch's own
    return list(scriptgraph.tensors(module, module.graph))


@pytest.mark.parametrize("how", ["scripted", "traced", "frozen"])
@pytest.mark.parametrize("native", [True, False])
def test_outputs_are_within_bf16s_rounding_at_sizes_it_was_not_saved_with(
    tmp_path: Path, how: How, native: bool
) -> None:
    script = scripted.load(save(tmp_path / "m.pt", Encoder(), torch.zeros(2, 7, dtype=torch.long), how))
    narrow_script(script, tmp_path / "bf16.pt")
    ids = torch.arange(20).reshape(5, 4)
    with torch.no_grad():
        expected = script(ids).numpy()
    found = TorchScriptRuntime(tmp_path / "bf16.pt", [IDS], [OUTPUT], native_bf16=native).run({"ids": ids.numpy()})
    assert found["output"].dtype == np.float32
    assert 0 < np.linalg.norm(found["output"] - expected) / np.linalg.norm(expected) < 1e-2


def test_matrices_are_bf16_and_the_parameters_of_norms_are_not(tmp_path: Path) -> None:
    script = scripted.load(save(tmp_path / "m.pt", Cnn(), torch.ones(2, 3, 16, 16)))
    assert narrow_script(script, tmp_path / "bf16.pt") == 3
    by_dtype = {(tensor.ndim, tensor.dtype) for tensor in _tensors(tmp_path / "bf16.pt") if tensor.is_floating_point()}
    assert {found for found in by_dtype if found[0] > 1} == {(4, torch.bfloat16), (2, torch.bfloat16)}
    assert (1, torch.float32) in by_dtype


def test_the_source_module_is_unchanged(tmp_path: Path) -> None:
    script = scripted.load(save(tmp_path / "m.pt", Mlp(), torch.ones(2, 16)))
    before = {name: tensor.clone() for name, tensor in script.state_dict().items()}
    with torch.no_grad():
        answer = script(torch.ones(3, 16))
        narrow_script(script, tmp_path / "bf16.pt")
        assert torch.equal(script(torch.ones(3, 16)), answer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in script.state_dict().items())


def test_branches_stay(tmp_path: Path) -> None:
    """A trace would contain only one of the two branches, which values decide between."""
    script = scripted.load(save(tmp_path / "m.pt", Deciding(), torch.ones(2, 16)))
    narrow_script(script, tmp_path / "bf16.pt")
    runtime = TorchScriptRuntime(tmp_path / "bf16.pt", [X], [OUTPUT])
    for x in (torch.ones(2, 16), -torch.ones(2, 16)):
        with torch.no_grad():
            np.testing.assert_allclose(runtime.run({"x": x.numpy()})["output"], script(x).numpy(), atol=0.05)


class Scaling(nn.Module):
    """A module with a weight but no product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum(0)


def test_a_module_without_products_is_rejected(tmp_path: Path) -> None:
    script = scripted.load(save(tmp_path / "m.pt", Scaling(), torch.ones(2, 16)))
    with pytest.raises(ConversionError, match="no product of the TorchScript module has an fp32 weight"):
        narrow_script(script, tmp_path / "bf16.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]
