"""TorchScript on the CPU, in bf16 and widened to fp32. The tests trace modules as the converter does.

``test_torchruntimes.py`` tests the rest."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import graphs
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import scriptgraph
from bf16kit.runtime.torchruntimes import TorchScriptRuntime

X = TensorSpec("x", "float32", ("batch", 16))
Y = TensorSpec("y", "float32", ("batch", 16))


class Edges(torch.nn.Module):
    """A module that casts floats to the core's dtype, runs the core, and casts back, as a TorchScript artifact does."""

    def __init__(self, core: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.core = core.to(dtype)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> Any:
        found = self.core(x.to(self.dtype))
        return tuple(t.float() for t in found) if isinstance(found, tuple) else found.float()


class Layer(torch.nn.Module):
    """A module with bf16 in every place that a trace has for it: parameter, buffer, attribute, constant, and dtype
    arguments."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = torch.nn.Linear(16, 16, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(16, 16, generator=generator) / 4)
        self.register_buffer("shift", torch.randn(16, generator=generator))
        self.attribute = torch.randn(16, generator=generator).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(x.shape[0], 16, dtype=x.dtype, device=x.device)
        h = self.linear(x) + self.shift + self.attribute.to(x.dtype) + made
        # 15 is also bfloat16's number: the length of this range must survive the widening.
        h = h * (torch.arange(15, device=x.device).sum() / 105).to(x.dtype)
        return torch.softmax(h, -1, dtype=torch.float32).to(x.dtype)


def trace(module: torch.nn.Module, example: Any, path: Path, *, freeze: bool = False) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        traced = torch.jit.trace(module.eval(), example, check_trace=False)  # type: ignore[no-untyped-call]
        torch.jit.save(torch.jit.freeze(traced) if freeze else traced, path)
    return path


def traced_layer(directory: Path, *, freeze: bool = False) -> Path:
    return trace(Edges(Layer(), torch.bfloat16), torch.zeros(2, 16), directory / "layer.pt", freeze=freeze)


def eager_layer(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return what widening must give, bit for bit: torch's own fp32 result of the layer with its bf16 weights."""
    module = Edges(Layer(), torch.bfloat16)
    module.core.float()
    module.core.attribute = module.core.attribute.float()
    module.dtype = torch.float32
    with torch.inference_mode():
        return np.asarray(module(torch.from_numpy(x)).numpy())


@pytest.mark.parametrize("freeze", [False, True], ids=["traced", "frozen"])
def test_a_module_computes_in_bf16_or_is_widened_to_fp32_with_the_bf16_weights(tmp_path: Path, freeze: bool) -> None:
    x, path = graphs.values(5, 16), traced_layer(tmp_path, freeze=freeze)
    wide = TorchScriptRuntime(path, [X], [Y], native_bf16=False)
    assert np.array_equal(wide.run({"x": x})["y"], eager_layer(x))
    assert (wide.info.precision, wide.info.accumulation) == ("bf16-weights", "fp32")
    assert "no bf16 instructions" in wide.info.note
    native = TorchScriptRuntime(path, [X], [Y], native_bf16=True)
    found = native.run({"x": x})["y"]
    assert np.array_equal(found, found.astype(ml_dtypes.bfloat16).astype(np.float32))  # every value is a bf16 number
    np.testing.assert_allclose(found, eager_layer(x), rtol=5e-2, atol=1e-3)
    assert (native.info.precision, native.info.accumulation, native.info.note) == ("bf16", "fp32", "")


def test_widening_leaves_no_bf16_and_changes_no_other_numbers(tmp_path: Path) -> None:
    loaded = TorchScriptRuntime(traced_layer(tmp_path), [X], [Y], native_bf16=False)
    module: Any = loaded._call
    graph = module.graph
    assert torch.bfloat16 not in {t.dtype for t in scriptgraph.tensors(module, graph)}
    ranges = [node for node in scriptgraph.nodes(graph) if node.kind() == "aten::arange"]
    assert [node.inputsAt(0).node().i("value") for node in ranges] == [15]


def test_a_comparison_of_dtypes_follows_the_widening() -> None:
    class Asks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x.to(torch.bfloat16)
            if h.dtype == torch.bfloat16:
                return h.to(torch.float32) + 1
            return h.to(torch.float32) - 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(Asks())
    scriptgraph.widen(scripted)
    found = scripted(torch.full((1,), 1 + 2**-10))
    assert found.item() == 2 + 2**-10  # the branch for "the narrow dtype", in fp32


def test_a_module_traced_on_the_cpu_can_be_sent_to_another_device(tmp_path: Path) -> None:
    """Tracing records the device of each new tensor in the graph."""
    module: Any = TorchScriptRuntime(traced_layer(tmp_path), [X], [Y])._call
    graph = module.graph
    scriptgraph.replace_devices(graph, "meta")
    assert devices(graph) == {"meta"}


def devices(graph: Any) -> set[str]:
    constants: Sequence[Any] = [n for n in scriptgraph.nodes(graph) if n.kind() == "prim::Constant"]
    return {n.s("value") for n in constants if n.output().type().kind() == "DeviceObjType"}
