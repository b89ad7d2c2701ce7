"""The runtimes of torch on the CPU, in bf16 and widened to fp32. The tests write files as the converter does."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import exportedfiles
import ml_dtypes
import numpy as np
import pytest
import torch
from torch.export.passes import move_to_device_pass

import graphs
from bf16kit.messages.errors import DeviceUnavailable, RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import scriptgraph
from bf16kit.runtime.torchruntimes import (
    TorchExportRuntime,
    TorchRuntime,
    TorchScriptRuntime,
    load_module,
    load_program,
    widen,
)

X = TensorSpec("x", "float32", ("batch", 16))
Y = TensorSpec("y", "float32", ("batch", 16))
BOTH = pytest.mark.parametrize("kind", [TorchScriptRuntime, TorchExportRuntime], ids=["torchscript", "pt2"])
Kind = type[TorchRuntime]


def written(kind: Kind, directory: Path, module: torch.nn.Module, *example: torch.Tensor, freeze: bool = False) -> Path:
    path, example = directory / "model", example or (torch.zeros(2, 16),)
    if kind is TorchExportRuntime:
        path.write_bytes(exportedfiles.exported(module.eval(), *example))
        return path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        traced = torch.jit.trace(module.eval(), example, check_trace=False, strict=False)  # type: ignore[no-untyped-call]
        torch.jit.save(torch.jit.freeze(traced) if freeze else traced, path)
    return path


# --- bf16, and its widening to fp32 -----------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A module with bf16 in every place that a program has for it: parameter, buffer, attribute, dtype arguments."""

    shift: torch.Tensor

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight, shift, self.attribute = (
            torch.randn(*shape, generator=generator).to(torch.bfloat16).to(dtype) for shape in ((16, 16), (16,), (16,))
        )
        self.weight = torch.nn.Parameter(weight / 4)
        self.register_buffer("shift", shift)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(x.shape[0], 16, dtype=self.dtype, device=x.device)
        h = x.to(self.dtype) @ self.weight + self.shift + self.attribute + made
        # 15 is also bfloat16's number: the length of this range must survive the widening.
        h = h * (torch.arange(15, device=x.device).sum() / 105).to(self.dtype)
        first, second = torch.chunk(torch.relu_(h * 1), 2, -1)
        return torch.softmax(torch.cat([second, first], -1), -1, dtype=torch.float32).to(self.dtype).float()


@pytest.mark.parametrize(
    ("kind", "freeze"),
    [(TorchScriptRuntime, False), (TorchScriptRuntime, True), (TorchExportRuntime, False)],
    ids=["traced", "frozen", "pt2"],
)
def test_a_program_computes_in_bf16_or_is_widened_to_fp32_with_the_bf16_weights(
    kind: Kind, freeze: bool, tmp_path: Path
) -> None:
    path, x = written(kind, tmp_path, Layer(), freeze=freeze), graphs.values(5, 16)
    for native, precision, dtype in ((True, "bf16", torch.bfloat16), (False, "bf16-weights", torch.float32)):
        loaded = kind(path, [X], [Y], native_bf16=native)
        with torch.inference_mode():
            expected = Layer(dtype)(torch.from_numpy(x)).numpy()
        assert np.array_equal(loaded.run({"x": x})["y"], expected)
        assert (loaded.info.precision, loaded.info.accumulation) == (precision, "fp32")
        assert ("was widened to fp32 once" in loaded.info.note) == (not native)
    assert torch.bfloat16 not in {tensor.dtype for tensor in widened(kind, path)}


def widened(kind: Kind, path: Path) -> list[torch.Tensor]:
    """Return the tensors of the program once it is widened."""
    if kind is TorchScriptRuntime:
        module = load_module(path, torch.device("cpu"))
        scriptgraph.widen(module)
        return list(scriptgraph.tensors(module, module.graph))
    program = load_program(path).module(check_guards=False)
    widen(program, (torch.bfloat16,))
    return [*program.parameters(), *program.buffers()]


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


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(16, 16, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.second(self.first(x.to(torch.bfloat16))).float())


@BOTH
def test_tied_weights_are_widened_once(kind: Kind, tmp_path: Path) -> None:
    found = widened(kind, written(kind, tmp_path, Tied()))
    assert {tensor.dtype for tensor in found} == {torch.float32}
    assert len({tensor.data_ptr() for tensor in found}) == 1


def test_a_program_written_on_the_cpu_can_be_sent_to_another_device(tmp_path: Path) -> None:
    """Tracing and export record the device of each new tensor in the graph."""
    graph = load_module(written(TorchScriptRuntime, tmp_path, Layer()), torch.device("cpu")).graph
    scriptgraph.replace_devices(graph, "meta")
    constants = [node for node in scriptgraph.nodes(graph) if node.kind() == "prim::Constant"]
    assert {n.s("value") for n in constants if n.output().type().kind() == "DeviceObjType"} == {"meta"}
    program = move_to_device_pass(load_program(written(TorchExportRuntime, tmp_path, Layer())), torch.device("meta"))
    found = program.module(check_guards=False).forward(torch.ones(3, 16, device="meta"))
    assert (found.device.type, tuple(found.shape)) == ("meta", (3, 16))


# --- edges, threads and errors ----------------------------------------------------------------------------------------


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)  # writes to its input


class Pair(torch.nn.Module):
    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x - shift, x.sum(1) > 0


class Named(torch.nn.Module):
    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"b": x.sum(1) > 0, "a": x - shift}


@BOTH
@pytest.mark.parametrize("module", [Pair(), Named()], ids=["tuple", "dict"])
def test_inputs_and_outputs_are_those_of_the_specs_in_their_order(
    kind: Kind, module: torch.nn.Module, tmp_path: Path
) -> None:
    path = written(kind, tmp_path, module, torch.zeros(2, 16), torch.ones(2, 16))
    outputs = [TensorSpec("a", "float32", ("batch", 16)), TensorSpec("b", "bool", ("batch",))]
    loaded = kind(path, [X, Y], outputs)
    feeds = {"y": graphs.values(2, 16, seed=1), "x": graphs.values(2, 16)}
    found = loaded.run(feeds)
    assert list(found) == ["a", "b"]
    assert np.array_equal(found["a"], feeds["x"] - feeds["y"])
    assert np.array_equal(found["b"], torch.from_numpy(feeds["x"]).sum(1).numpy() > 0)
    assert list(loaded.run(feeds, ["b"])) == ["b"]


@BOTH
@pytest.mark.parametrize("native", [False, True])
def test_bf16_edges_keep_every_bit(kind: Kind, native: bool, tmp_path: Path) -> None:
    class Unchanged(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    path = written(kind, tmp_path, Unchanged(), torch.zeros(2, dtype=torch.bfloat16))
    specs = TensorSpec("x", "bfloat16", ("n",)), TensorSpec("y", "bfloat16", ("n",))
    x = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16)
    found = kind(path, specs[:1], specs[1:], native_bf16=native).run({"x": x})["y"]
    assert found.dtype == x.dtype
    assert np.array_equal(found.view(np.uint16), x.view(np.uint16))


@BOTH
@pytest.mark.parametrize("writeable", [True, False])
def test_inputs_are_never_written_and_may_be_read_only(kind: Kind, writeable: bool, tmp_path: Path) -> None:
    x = np.ones((2, 16), np.float32)
    x.flags.writeable = writeable
    assert (kind(written(kind, tmp_path, Double()), [X], [Y]).run({"x": x})["y"] == 2).all()
    assert (x == 1).all()


@BOTH
@pytest.mark.parametrize("threads", [1, 2])
def test_runs_on_every_thread_use_the_configured_number_of_threads(kind: Kind, threads: int, tmp_path: Path) -> None:
    layer, x = torch.nn.Linear(16, 16), graphs.values(3, 16)
    path = written(kind, tmp_path, layer)
    loaded = kind(path, [X], [Y], threads=threads)
    path.write_bytes(b"")  # no longer needed; if the file were mapped, this would kill the process
    expected, seen, same = loaded.run({"x": x})["y"], set[int](), set[bool]()
    with torch.inference_mode():
        np.testing.assert_allclose(expected, layer(torch.from_numpy(x)).numpy(), rtol=1e-5, atol=1e-6)
    info = loaded.info  # a program without bf16 is fp32
    assert (info.precision, info.accumulation, info.note) == ("fp32", "fp32", "")
    assert (info.backend, info.profile, info.device) == (kind.backend, kind.profile, "cpu")

    def work() -> None:
        same.update(np.array_equal(loaded.run({"x": x})["y"], expected) for _ in range(20))
        seen.add(torch.get_num_threads())

    before = torch.get_num_threads()
    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.set_num_threads(before)
    assert (seen, same) == ({threads}, {True})


@BOTH
def test_several_threads_may_load_programs(kind: Kind, tmp_path: Path) -> None:
    """torch.export's own loader fails for the second of two threads."""
    path, x = written(kind, tmp_path, torch.nn.Linear(16, 16).to(torch.bfloat16).float()), graphs.values(2, 16)
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: kind(path, [X], [Y], native_bf16=False), range(8)))
    assert all(np.array_equal(each.run({"x": x})["y"], loaded[0].run({"x": x})["y"]) for each in loaded)


@BOTH
@pytest.mark.parametrize("content", [b"", b"text named .pt", b"PK\x03\x04 not a whole archive"])
def test_a_file_of_another_kind_is_a_runtime_failure(kind: Kind, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.any").write_bytes(content)
    with pytest.raises(RuntimeFailure, match=r"cannot load model\.any: "):
        kind(tmp_path / "model.any", [X], [Y])


@BOTH
def test_a_run_that_fails_and_a_closed_runtime_are_runtime_failures(kind: Kind, tmp_path: Path) -> None:
    loaded = kind(written(kind, tmp_path, torch.nn.Linear(16, 16)), [X], [Y])
    with pytest.raises(RuntimeFailure, match=f"{kind.title} failed: "):
        loaded.run({"x": graphs.values(1, 17)})
    two = kind(tmp_path / "model", [X], [Y, X])
    with pytest.raises(RuntimeFailure, match="gives 1 outputs, expected 2: y, x"):
        two.run({"x": graphs.values(1, 16)})
    loaded.close()
    with pytest.raises(RuntimeFailure, match="the model is closed"):
        loaded.run({"x": graphs.values(1, 16)})


@BOTH
def test_strings_and_missing_devices_are_rejected_before_the_file_is_read(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match="'s' is a string tensor"):
        kind(tmp_path / "never read", [TensorSpec("s", "string", (1,))], [Y])
    said = "cuda:9 was asked for, but " + ("there are" if torch.cuda.is_available() else ".* sees no CUDA device")
    with pytest.raises(DeviceUnavailable, match=said):
        kind(tmp_path / "never read", [X], [Y], device="cuda:9")
