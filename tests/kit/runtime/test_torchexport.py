"""torch.export programs on the CPU, in bf16 and widened to fp32. The tests export them as the converter does.

``test_torchruntimes.py`` tests the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import exportedfiles as files
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.export.passes import move_to_device_pass

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.torchruntimes import TorchExportRuntime, load_program

X = TensorSpec("x", "float32", ("batch", 16))
Y = TensorSpec("y", "float32", ("batch", 16))


class Layer(torch.nn.Module):
    """A module with bf16 in every place that a program has for it: parameter, buffer, constant, and dtype arguments."""

    shift: torch.Tensor

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(16, 16, generator=generator).to(torch.bfloat16).to(dtype) / 4)
        self.register_buffer("shift", torch.randn(16, generator=generator).to(torch.bfloat16).to(dtype))
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(x.shape[0], 16, dtype=self.dtype, device=x.device)
        h = x.to(self.dtype) @ self.weight + self.shift + made
        first, second = torch.chunk(torch.relu_(h * 1), 2, -1)
        return torch.cat([second, first], -1).float()


def written(directory: Path, module: torch.nn.Module | None = None) -> Path:
    path = directory / "m.pt2"
    path.write_bytes(files.exported(module or Layer(), torch.zeros(2, 16)))
    return path


def rows(count: int = 3) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((count, 16), np.float32)


def eager(module: torch.nn.Module, x: NDArray[np.float32]) -> NDArray[np.float32]:
    with torch.inference_mode():
        return np.asarray(module(torch.from_numpy(x)).numpy())


def test_bf16_is_computed_in_bf16_if_the_device_can(tmp_path: Path) -> None:
    runtime = TorchExportRuntime(written(tmp_path), [X], [Y], native_bf16=True)
    for count in (1, 3):
        assert np.array_equal(runtime.run({"x": rows(count)})["y"], eager(Layer(), rows(count)))
    assert (runtime.info.backend, runtime.info.profile, runtime.info.precision) == ("torchexport", "pt2", "bf16")
    assert runtime.info.accumulation == "fp32"
    assert runtime.info.note == ""


def test_otherwise_the_bf16_weights_are_widened_once_and_computed_in_fp32(tmp_path: Path) -> None:
    runtime = TorchExportRuntime(written(tmp_path), [X], [Y], native_bf16=False)
    assert np.array_equal(runtime.run({"x": rows()})["y"], eager(Layer(torch.float32), rows()))
    assert runtime.info.precision == "bf16-weights"
    assert "was widened to fp32 once" in runtime.info.note


def test_a_program_that_this_torch_cannot_load_is_rejected_with_the_reason(tmp_path: Path) -> None:
    def rename(program: Any) -> None:
        files.node(program)["target"] = "torch.ops.aten.of_tomorrow.default"

    path = written(tmp_path)
    path.write_bytes(files.changed(path.read_bytes(), files.MODEL, rename))
    with pytest.raises(RuntimeFailure, match="of_tomorrow"):
        TorchExportRuntime(path, [X], [Y])


def test_a_program_exported_on_the_cpu_can_be_sent_to_another_device(tmp_path: Path) -> None:
    """Export records the device of each new tensor in the graph."""
    program = move_to_device_pass(load_program(written(tmp_path)), torch.device("meta"))
    found = program.module(check_guards=False).forward(torch.ones(3, 16, device="meta"))
    assert (found.device.type, tuple(found.shape)) == ("meta", (3, 16))
