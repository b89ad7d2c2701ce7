"""The torch.export program has bf16 inside, fp32 at its edges, the same bytes every time, and is read by torch."""

from __future__ import annotations

from pathlib import Path

import exportedfiles as files
import numpy as np
import pytest
import torch
from architectures import Cnn, Mlp, seeded
from torch import nn

from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.torchexport import TorchExportRuntime
from bf16kit.runtime.torchscript import TorchScriptRuntime
from converter.read.torch.onnx_export import adapt
from converter.write.torchscript import narrow_and_export, narrow_and_trace

X = (TensorSpec("x", "float32", ("batch", 16)),)
Y = (TensorSpec("output", "float32", ("batch", 10)),)
IMAGE = (TensorSpec("image", "float32", ("batch", 3, 16, 16)),)


@pytest.mark.long
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("module", "inputs"), [(Mlp, X), (Cnn, IMAGE)])
def test_the_outputs_are_those_of_torchscript(
    tmp_path: Path, native: bool, module: type[nn.Module], inputs: tuple[TensorSpec, ...]
) -> None:
    model = adapt(seeded(module()), inputs)
    narrow_and_export(model, tmp_path / "m.pt2")
    narrow_and_trace(model, tmp_path / "m.pt")
    shape = [3 if isinstance(dim, str) else dim for dim in inputs[0].shape]
    feeds = {inputs[0].name: np.random.default_rng(0).standard_normal(shape, np.float32)}
    found = TorchExportRuntime(tmp_path / "m.pt2", inputs, Y, native_bf16=native).run(feeds)["output"]
    traced = TorchScriptRuntime(tmp_path / "m.pt", inputs, Y, native_bf16=native).run(feeds)["output"]
    assert found.dtype == np.float32
    assert np.allclose(found, traced, rtol=1e-6, atol=1e-6)


def test_the_file_contains_no_path_or_device_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    narrow_and_export(adapt(seeded(Cnn()), IMAGE), path)
    assert str(Path(__file__).parents[3]).encode() not in path.read_bytes()
    assert b"site-packages" not in path.read_bytes()
    assert b"autocast" not in path.read_bytes()
    assert files.records(path.read_bytes())["data/sample_inputs/model.pt"] == b""


def test_a_module_that_cannot_be_exported_is_reported_and_no_file_is_left(tmp_path: Path) -> None:
    class Branching(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    with pytest.raises(ConversionError, match="torch cannot export the model in bf16: "):
        narrow_and_export(adapt(Branching(), X), tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_changes_its_own_buffers_is_rejected(tmp_path: Path) -> None:
    class Counting(nn.Module):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x + self.count

    with pytest.raises(ConversionError, match="it changes its own buffer or input 'count'"):
        narrow_and_export(adapt(Counting(), X), tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("native", [True, False])
def test_recurrent_layers_stay_fp32_among_bf16_ones(tmp_path: Path, native: bool) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.layer, self.down = nn.Linear(16, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.down(self.layer(self.up(x))[0])
            return result

    inputs = (TensorSpec("x", "float32", ("batch", 3, 16)),)
    narrow_and_export(adapt(seeded(Recurrent()), inputs), tmp_path / "m.pt2")
    out = (TensorSpec("output", "float32", ("batch", 3, 8)),)
    x = np.random.default_rng(0).standard_normal((2, 3, 16), np.float32)
    found = TorchExportRuntime(tmp_path / "m.pt2", inputs, out, native_bf16=native).run({"x": x})["output"]
    with torch.no_grad():
        expected = seeded(Recurrent())(torch.from_numpy(x)).numpy()
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 2e-2
