"""Hand-made graphs and modules on a GPU: bf16 products, fp32 accumulation, and never TF32."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

import graphs
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.ort.onnx import OnnxRuntime
from bf16kit.runtime.probe import probe_onnx

pytestmark = pytest.mark.gpu

X = TensorSpec("x", "float32", ("batch", 1024))
Y = TensorSpec("y", "float32", ("batch", 1024))


def distance(reference: NDArray[Any], candidate: NDArray[Any]) -> float:
    r, c = reference.astype(np.float64), candidate.astype(np.float64)
    return float(np.linalg.norm(c - r) / np.linalg.norm(r))


def product(dtype: int) -> ModelProto:
    """Return a graph: x [batch, 1024] fp32 → cast to ``dtype`` → MatMul, LayerNormalization → cast to fp32 → y."""
    weight = graphs.values(1024, 1024)
    scale = np.ones(1024, np.float32)
    nodes = [
        helper.make_node("Cast", ["x"], ["narrow"], to=dtype),
        helper.make_node("Cast", ["w"], ["w_narrow"], to=dtype),
        helper.make_node("Cast", ["scale"], ["scale_narrow"], to=dtype),
        helper.make_node("MatMul", ["narrow", "w_narrow"], ["m"]),
        helper.make_node("LayerNormalization", ["m", "scale_narrow"], ["n"]),
        helper.make_node("Cast", ["n"], ["y"], to=TensorProto.FLOAT),
    ]
    initializers = [graphs.initializer("w", weight), graphs.initializer("scale", scale)]
    return graphs.model(nodes, [graphs.edge("x", X.shape)], [graphs.edge("y", Y.shape)], initializers)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_onnx_runtime_accumulates_in_fp32(onnx_device: str, precision: str) -> None:
    assert probe_onnx(onnx_device, precision) == "fp32"


@pytest.mark.parametrize("rows", [1, 8, 256])
def test_onnx_bf16_stays_near_the_fp32_reference(onnx_device: str, rows: int) -> None:
    x = graphs.values(rows, 1024, seed=1) * np.float32(np.sqrt(rows))
    graph = product(TensorProto.BFLOAT16).SerializeToString()
    reference = OnnxRuntime(product(TensorProto.FLOAT).SerializeToString(), [X], [Y], precision="fp32")
    loaded = OnnxRuntime(graph, [X], [Y], device=onnx_device, profile="cuda", precision="bf16")
    assert loaded.info.device == onnx_device
    assert loaded.info.accumulation == "fp32"
    # bf16 inputs, weights, product and norm: four roundings of about 1.7e-3 each
    assert 1e-4 < distance(reference.run({"x": x})["y"], loaded.run({"x": x})["y"]) < 6e-3


def test_onnx_fp32_is_never_tf32(onnx_device: str) -> None:
    """TF32 keeps 10 bits of fraction: its products are off by about 3e-4."""
    model = product(TensorProto.FLOAT).SerializeToString()
    x = graphs.values(64, 1024, seed=1)
    on_cpu = OnnxRuntime(model, [X], [Y], precision="fp32").run({"x": x})["y"]
    on_gpu = OnnxRuntime(model, [X], [Y], device=onnx_device, precision="fp32").run({"x": x})["y"]
    assert distance(on_cpu, on_gpu) < 1e-5


def test_a_missing_device_is_a_runtime_failure(onnx_device: str) -> None:
    from bf16kit.messages.errors import RuntimeFailure

    with pytest.raises(RuntimeFailure):
        probe_onnx("cuda:999", "bf16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_torch_accumulates_in_fp32_and_is_never_tf32(torch_device: str, tmp_path: Path, dtype: str) -> None:
    import torch

    from bf16kit.runtime.torchruntimes import TorchScriptRuntime

    core = torch.nn.Linear(1024, 1024).to(getattr(torch, dtype))
    path = trace(core, tmp_path / "linear.pt")
    x = graphs.values(64, 1024, seed=1)
    on_cpu = TorchScriptRuntime(path, [X], [Y], native_bf16=False).run({"x": x})["y"]
    loaded = TorchScriptRuntime(path, [X], [Y], device=torch_device)
    assert loaded.info.accumulation == "fp32"
    assert loaded.info.precision == ("bf16" if dtype == "bfloat16" else "fp32")
    assert distance(on_cpu, loaded.run({"x": x})["y"]) < (1e-5 if dtype == "float32" else 6e-3)


def test_a_module_traced_on_the_cpu_makes_its_tensors_on_the_gpu(torch_device: str, tmp_path: Path) -> None:
    import torch

    from bf16kit.runtime.torchruntimes import TorchScriptRuntime

    class Makes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.arange(1024, device=x.device, dtype=x.dtype)

    path = trace(Makes().to(torch.bfloat16), tmp_path / "makes.pt", dtype=torch.float32)
    x = np.zeros((2, 1024), np.float32)
    found = TorchScriptRuntime(path, [X], [Y], device=torch_device).run({"x": x})["y"]
    assert np.array_equal(found[1], np.arange(1024, dtype=np.float32))


def trace(core: Any, path: Path, dtype: Any = None) -> Path:
    """Trace ``core`` with fp32 inputs and outputs, as the converter does, and return ``path``."""
    import torch

    inner = next(core.parameters()).dtype if dtype is None else dtype

    class Edges(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = core

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.core(x.to(inner)).float())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        traced = torch.jit.trace(Edges().eval(), torch.zeros(2, 1024), check_trace=False)  # type: ignore[no-untyped-call]
        torch.jit.save(traced, path)
    return path
