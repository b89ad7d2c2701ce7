"""TorchScript on the CPU, in bf16 and widened to fp32. The tests trace modules as the converter does."""

from __future__ import annotations

import threading
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
from bf16kit.messages.errors import DeviceUnavailable, RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import scriptgraph
from bf16kit.runtime.torchscript import TorchScriptRuntime

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
def test_a_widened_module_computes_in_fp32_with_the_bf16_weights(tmp_path: Path, freeze: bool) -> None:
    x = graphs.values(5, 16)
    loaded = TorchScriptRuntime(traced_layer(tmp_path, freeze=freeze), [X], [Y], native_bf16=False)
    assert np.array_equal(loaded.run({"x": x})["y"], eager_layer(x))
    assert loaded.info.precision == "bf16-weights"
    assert loaded.info.accumulation == "fp32"
    assert "no bf16 instructions" in loaded.info.note


@pytest.mark.parametrize("freeze", [False, True], ids=["traced", "frozen"])
def test_with_native_bf16_a_module_computes_in_bf16(tmp_path: Path, freeze: bool) -> None:
    x = graphs.values(5, 16)
    loaded = TorchScriptRuntime(traced_layer(tmp_path, freeze=freeze), [X], [Y], native_bf16=True)
    found = loaded.run({"x": x})["y"]
    assert np.array_equal(found, found.astype(ml_dtypes.bfloat16).astype(np.float32))  # every value is a bf16 number
    np.testing.assert_allclose(found, eager_layer(x), rtol=5e-2, atol=1e-3)
    assert (loaded.info.precision, loaded.info.accumulation, loaded.info.note) == ("bf16", "fp32", "")


def test_widening_leaves_no_bf16_and_changes_no_other_numbers(tmp_path: Path) -> None:
    loaded = TorchScriptRuntime(traced_layer(tmp_path), [X], [Y], native_bf16=False)
    module: Any = loaded._call
    graph = module.graph
    assert torch.bfloat16 not in {t.dtype for t in scriptgraph.tensors(module, graph)}
    ranges = [node for node in scriptgraph.nodes(graph) if node.kind() == "aten::arange"]
    assert [node.inputsAt(0).node().i("value") for node in ranges] == [15]


def test_tied_weights_stay_tied_when_widened(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(16, 16, bias=False)
            self.second = torch.nn.Linear(16, 16, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.second(self.first(x)))

    path = trace(Edges(Tied(), torch.bfloat16), torch.zeros(2, 16), tmp_path / "tied.pt")
    loaded = TorchScriptRuntime(path, [X], [Y], native_bf16=False)
    module: Any = loaded._call
    assert len({t.data_ptr() for t in scriptgraph.tensors(module, module.graph)}) == 1


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
    scriptgraph.replace_dtypes(scripted.graph, scriptgraph.BFLOAT16, scriptgraph.FLOAT32)
    found = scripted(torch.full((1,), 1 + 2**-10))
    assert found.item() == 2 + 2**-10  # the branch for "the narrow dtype", in fp32


def test_a_transformer_traced_in_bf16_is_widened_exactly(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertModel(config)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.bert(input_ids=ids, attention_mask=mask).last_hidden_state.float())

    module = Hidden().to(torch.bfloat16).eval()
    ids = np.arange(10, dtype=np.int64).reshape(2, 5)
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int64)
    path = trace(module, (torch.from_numpy(ids), torch.from_numpy(mask)), tmp_path / "bert.pt")
    specs = [TensorSpec(name, "int64", ("batch", "seq")) for name in ("ids", "mask")]
    output = [TensorSpec("hidden", "float32", ("batch", "seq", 32))]
    found = TorchScriptRuntime(path, specs, output, native_bf16=False).run({"ids": ids, "mask": mask})["hidden"]
    with torch.inference_mode():
        expected = module.float()(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_module_in_fp32_is_reported_as_fp32(tmp_path: Path) -> None:
    path = trace(torch.nn.Linear(16, 16), torch.zeros(2, 16), tmp_path / "fp32.pt")
    info = TorchScriptRuntime(path, [X], [Y]).info
    assert (info.precision, info.accumulation, info.note) == ("fp32", "fp32", "")


class Pair(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x.sum(1) > 0


class Named(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"b": x.sum(1) > 0, "a": x + 1}


def pair_specs() -> list[TensorSpec]:
    return [TensorSpec("a", "float32", ("batch", 16)), TensorSpec("b", "bool", ("batch",))]


@pytest.mark.parametrize("module", [Pair(), Named()], ids=["tuple", "dict"])
def test_outputs_are_named_in_the_order_of_the_specs(tmp_path: Path, module: torch.nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), tmp_path / "m.pt")
    loaded = TorchScriptRuntime(tmp_path / "m.pt", [X], pair_specs())
    x = graphs.values(3, 16)
    found = loaded.run({"x": x})
    assert list(found) == ["a", "b"]
    assert np.array_equal(found["a"], x + 1)
    assert np.array_equal(found["b"], torch.from_numpy(x).sum(1).numpy() > 0)
    assert list(loaded.run({"x": x}, ["b"])) == ["b"]


def test_a_wrong_number_of_outputs_is_a_runtime_failure(tmp_path: Path) -> None:
    path = trace(Pair(), torch.zeros(2, 16), tmp_path / "pair.pt")
    with pytest.raises(RuntimeFailure, match="gives 2 outputs, expected 1: y"):
        TorchScriptRuntime(path, [X], [Y]).run({"x": graphs.values(1, 16)})


@pytest.mark.parametrize("native", [False, True])
def test_bf16_edges_keep_every_bit(tmp_path: Path, native: bool) -> None:
    path = trace(torch.nn.Identity(), torch.zeros(1, dtype=torch.bfloat16), tmp_path / "identity.pt")
    specs = TensorSpec("x", "bfloat16", ("n",)), TensorSpec("y", "bfloat16", ("n",))
    x = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16)
    found = TorchScriptRuntime(path, specs[:1], specs[1:], native_bf16=native).run({"x": x})["y"]
    assert found.dtype == x.dtype
    assert np.array_equal(found.view(np.uint16), x.view(np.uint16))


def test_read_only_inputs_are_accepted_without_a_warning_and_never_written(tmp_path: Path) -> None:
    class Writes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

    path = trace(Writes(), torch.zeros(2, 16), tmp_path / "writes.pt")
    x = np.zeros((2, 16), np.float32)
    x.flags.writeable = False
    assert (TorchScriptRuntime(path, [X], [Y]).run({"x": x})["y"] == 1).all()
    assert (x == 0).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_runs_on_every_thread_use_the_configured_number_of_threads(tmp_path: Path, threads: int) -> None:
    loaded = TorchScriptRuntime(traced_layer(tmp_path), [X], [Y], threads=threads)
    seen: list[int] = []

    def work() -> None:
        loaded.run({"x": graphs.values(1, 16)})
        seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
        worker.join()
    torch.set_num_threads(before)
    assert seen == [threads, threads]


@pytest.mark.parametrize("content", [b"", b"text named .pt", b"PK\x03\x04 not a whole archive"])
def test_a_file_that_is_not_torchscript_is_a_runtime_failure(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.torchscript.pt").write_bytes(content)
    with pytest.raises(RuntimeFailure, match=r"cannot load model\.torchscript\.pt"):
        TorchScriptRuntime(tmp_path / "model.torchscript.pt", [X], [Y])


def test_a_module_that_fails_while_running_is_a_runtime_failure(tmp_path: Path) -> None:
    loaded = TorchScriptRuntime(traced_layer(tmp_path), [X], [Y])
    with pytest.raises(RuntimeFailure, match="TorchScript failed"):
        loaded.run({"x": graphs.values(1, 17)})


def test_strings_are_rejected_at_load(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match="'s' is a string tensor"):
        TorchScriptRuntime(tmp_path / "never read", [TensorSpec("s", "string", (1,))], [Y])


def test_running_a_closed_runtime_fails(tmp_path: Path) -> None:
    loaded = TorchScriptRuntime(traced_layer(tmp_path), [X], [Y])
    loaded.close()
    with pytest.raises(RuntimeFailure, match="closed"):
        loaded.run({"x": graphs.values(1, 16)})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_the_error_for_cuda_without_a_device_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable, match="sees no CUDA device"):
        TorchScriptRuntime(traced_layer(tmp_path), [X], [Y], device="cuda:0")


def test_a_module_traced_on_the_cpu_can_be_sent_to_another_device(tmp_path: Path) -> None:
    """Tracing records the device of each new tensor in the graph."""
    module: Any = TorchScriptRuntime(traced_layer(tmp_path), [X], [Y])._call
    graph = module.graph
    scriptgraph.replace_devices(graph, "meta")
    assert devices(graph) == {"meta"}


def devices(graph: Any) -> set[str]:
    constants: Sequence[Any] = [n for n in scriptgraph.nodes(graph) if n.kind() == "prim::Constant"]
    return {n.s("value") for n in constants if n.output().type().kind() == "DeviceObjType"}
