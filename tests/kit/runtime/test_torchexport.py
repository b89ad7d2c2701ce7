"""torch.export programs on the CPU, in bf16 and widened to fp32. The tests export them as the converter does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exportedfiles as files
import numpy as np
import pytest
import torch
from architectures import Mlp, seeded
from numpy.typing import NDArray

from bf16kit.messages.errors import DeviceUnavailable, RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.exported.graph import Graph, Node, Program, parse_program
from bf16kit.runtime.exported.values import Ref
from bf16kit.runtime.torchexport import TorchExportRuntime, bind, read_file
from bf16kit.runtime.torchscript import to_tensor

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


def written(directory: Path, module: torch.nn.Module | None = None, *example: torch.Tensor) -> Path:
    path = directory / "m.pt2"
    path.write_bytes(files.exported(module or Layer(), *(example or (torch.zeros(2, 16),))))
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


def test_a_program_without_bf16_is_fp32(tmp_path: Path) -> None:
    runtime = TorchExportRuntime(written(tmp_path, Layer(torch.float32)), [X], [Y])
    assert np.array_equal(runtime.run({"x": rows()})["y"], eager(Layer(torch.float32), rows()))
    assert (runtime.info.precision, runtime.info.note) == ("fp32", "")


def test_the_output_equals_that_of_torchs_own_loader(tmp_path: Path) -> None:
    path = written(tmp_path)
    torchs = torch.export.load(path).module()
    found = TorchExportRuntime(path, [X], [Y], native_bf16=True).run({"x": rows()})["y"]
    assert np.array_equal(found, eager(torchs, rows()))


def test_inputs_and_outputs_are_those_of_the_specs_in_their_order(tmp_path: Path) -> None:
    class Two(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return a - b, a + b

    path = written(tmp_path, Two(), torch.ones(2, 3), torch.ones(2, 3))
    left, right = (TensorSpec(name, "float32", ("batch", 3)) for name in ("left", "right"))
    runtime = TorchExportRuntime(path, [left, right], [Y, X])
    feeds = {"right": np.full((1, 3), 2.0, np.float32), "left": np.full((1, 3), 5.0, np.float32)}
    assert runtime.run(feeds)["y"].tolist() == [[3.0] * 3]
    assert list(runtime.run(feeds, ["x"])) == ["x"]
    assert runtime.run(feeds, ["x"])["x"].tolist() == [[7.0] * 3]


def test_inputs_are_not_written_to(tmp_path: Path) -> None:
    x = rows()
    x.flags.writeable = False
    TorchExportRuntime(written(tmp_path), [X], [Y]).run({"x": x})
    assert np.array_equal(x, rows())


def test_several_threads_may_run_one_runtime(tmp_path: Path) -> None:
    runtime = TorchExportRuntime(written(tmp_path), [X], [Y], threads=1)
    expected = runtime.run({"x": rows()})["y"]
    found: list[bool] = []

    def work() -> None:
        found.extend(np.array_equal(runtime.run({"x": rows()})["y"], expected) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80


def test_running_a_closed_runtime_fails(tmp_path: Path) -> None:
    runtime = TorchExportRuntime(written(tmp_path), [X], [Y])
    runtime.close()
    with pytest.raises(RuntimeFailure, match="the model is closed"):
        runtime.run({"x": rows()})


def test_an_operator_that_fails_is_a_runtime_failure(tmp_path: Path) -> None:
    runtime = TorchExportRuntime(written(tmp_path), [X], [Y])
    with pytest.raises(RuntimeFailure, match=r"torch\.export's program failed: "):
        runtime.run({"x": np.ones((2, 5), np.float32)})


def test_a_missing_device_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable, match="cuda:9"):
        TorchExportRuntime(written(tmp_path), [X], [Y], device="cuda:9")


def test_the_file_is_not_needed_once_it_is_loaded(tmp_path: Path) -> None:
    path = written(tmp_path)
    runtime = TorchExportRuntime(path, [X], [Y], native_bf16=True)
    path.write_bytes(b"")  # if the file were mapped, this would kill the process
    assert np.array_equal(runtime.run({"x": rows()})["y"], eager(Layer(), rows()))


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        ([X, X], [Y], "takes 1 tensors and gives 1, expected 2 and 1"),
        ([X], [Y, Y], "takes 1 tensors and gives 1, expected 1 and 2"),
        ([TensorSpec("x", "int64", ("batch", 16))], [Y], "input 'x' is float32 of rank 2, expected int64 of rank 2"),
        ([TensorSpec("x", "float32", ("batch",))], [Y], "of rank 2, expected float32 of rank 1"),
        ([TensorSpec("x", "string", ("batch", 16))], [Y], "is a string tensor"),
    ],
)
def test_a_program_that_does_not_match_the_specs_is_rejected(
    tmp_path: Path, inputs: list[TensorSpec], outputs: list[TensorSpec], said: str
) -> None:
    with pytest.raises(RuntimeFailure, match=said):
        TorchExportRuntime(written(tmp_path), inputs, outputs)


def call(target: str) -> Callable[[Any], object]:
    """Return an edit that lets the first node call ``target`` with a command to run."""
    given = [{"name": "", "arg": {"as_string": "touch executed"}, "kind": 1}]
    return lambda program: files.node(program).update(target=target, inputs=given)


@pytest.mark.parametrize("target", ["torch.os.system", "torch.ops.aten.no_such.default", "torch._C._cuda_init"])
def test_a_program_with_an_unknown_operator_is_rejected_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlp_program: bytes, target: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "m.pt2"
    path.write_bytes(files.changed(mlp_program, files.MODEL, call(target)))
    with pytest.raises(RuntimeFailure, match=rf"m\.pt2: uses the operator '{target}'"):
        TorchExportRuntime(path, [X], [TensorSpec("y", "float32", ("batch", 10))])
    assert [found.name for found in tmp_path.iterdir()] == ["m.pt2"]


def test_an_operator_that_this_torch_lacks_is_named_in_the_error(tmp_path: Path, mlp_program: bytes) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(files.changed(mlp_program, files.MODEL, call("torch.ops.aten.linear.of_tomorrow")))
    with pytest.raises(RuntimeFailure, match=r"of_tomorrow', which torch .* does not have"):
        TorchExportRuntime(path, [X], [TensorSpec("y", "float32", ("batch", 10))])


@pytest.fixture(scope="module")
def mlp_program() -> bytes:
    return files.exported(seeded(Mlp()), torch.ones(2, 16))


def test_values_are_released_after_their_last_use(tmp_path: Path) -> None:
    def step(place: int) -> Node:
        return Node("torch.ops.aten.relu.default", (Ref(f"v{place}"),), {}, (f"v{place + 1}",), single=True)

    program = Program((), {"v0": "w"}, Graph(("v0",), tuple(map(step, range(4))), (Ref("v4"),)), ("y",))
    values = {"v0": torch.ones(2)}
    assert bind(program, torch.device("cpu")).run(values)["y"].tolist() == [1, 1]
    assert sorted(values) == ["v0", "v4"]  # the weight and the output remain


def test_a_program_makes_no_tensor_on_the_device_of_its_export(tmp_path: Path) -> None:
    """Bound to another device, the program makes nothing on the CPU: an operator with tensors on both would fail."""
    archive = read_file(written(tmp_path))
    program = parse_program(archive.program, archive.tensors)
    device = torch.device("meta")
    bound = bind(program, device)
    held = {value: to_tensor(archive.tensor(fqn)).to(device) for value, fqn in program.tensors.items()}
    (found,) = bound.run_graph(held | {"x": torch.ones(3, 16, device=device)})
    assert (found.device, tuple(found.shape)) == (device, (3, 16))


class Modes(torch.nn.Module):
    """A module that uses modes of torch in forward, as transformers' rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            angle = torch.cos(x)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.line(x)
        with torch.autocast("cpu", enabled=False):
            z = x @ x.t() @ x
        found: torch.Tensor = y.float() + z + angle
        return found


def test_modes_of_torch_are_kept(tmp_path: Path) -> None:
    module = Modes().eval()
    path = written(tmp_path, module)
    assert b"wrap_with_autocast" in path.read_bytes()
    found = TorchExportRuntime(path, [X], [Y]).run({"x": rows()})["y"]
    assert np.array_equal(found, eager(module, rows()))


def called(directory: Path, target: str, *inputs: tuple[str, Any]) -> Path:
    """Write a program whose first operator is ``target`` with ``inputs``, and return its path."""

    def edit(program: Any) -> None:
        given = [{"name": name, "arg": arg, "kind": 1} for name, arg in inputs]
        files.node(program).update(target=target, inputs=given)

    path = directory / "m.pt2"
    archive = files.exported(Doubled(), torch.zeros(2, 16), batch=False)
    path.write_bytes(files.changed(archive, files.MODEL, edit))
    return path


class Doubled(torch.nn.Module):
    """A module with one operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


TENSOR_X = ("self", {"as_tensor": {"name": "x"}})


def test_a_program_cannot_read_the_memory_around_its_inputs(tmp_path: Path) -> None:
    """An input may be a part of a buffer that also holds data of other requests."""
    path = called(
        tmp_path,
        "torch.ops.aten.as_strided.default",
        TENSOR_X,
        ("size", {"as_ints": [2, 16]}),
        ("stride", {"as_ints": [16, 1]}),
        ("storage_offset", {"as_int": 16}),
    )
    spec = TensorSpec("x", "float32", (2, 16))
    runtime = TorchExportRuntime(path, [spec], [TensorSpec("y", "float32", (2, 16))])
    around = np.arange(6 * 16, dtype=np.float32).reshape(6, 16)
    with pytest.raises(RuntimeFailure, match="out of bounds for storage of size 128"):
        runtime.run({"x": around[1:5:3]})


def test_an_operator_that_writes_into_its_inputs_is_rejected_whatever_its_name(tmp_path: Path) -> None:
    given = (TENSOR_X, ("out", {"as_tensor": {"name": "x"}}))
    path = called(tmp_path, "torch.ops.aten.xlogy.OutTensor", TENSOR_X, ("other", given[0][1]), given[1])
    with pytest.raises(RuntimeFailure, match="which writes into its inputs"):
        TorchExportRuntime(path, [X], [Y])


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("torch.sym_ite", (True, Ref("x"), Ref("x"))),  # returns the input itself, but would count as a new tensor
        ("_operator.pos", (Ref("x"),)),
        ("_operator.floordiv", (Ref("x"), -1)),  # would bypass the guard of floor_divide
        ("_operator.mul", ([1], 2**60)),
        ("_operator.mul", (2**40, 2**40)),
    ],
)
def test_arithmetic_on_sizes_accepts_only_sizes(target: str, args: tuple[Any, ...]) -> None:
    node = Node(target, args, {}, ("y",), single=True)
    bound = bind(Program((), {}, Graph(("x",), (node,), (Ref("y"),)), ("y",)), torch.device("cpu"))
    with pytest.raises(RuntimeFailure, match="is given a value that is not a size"):
        bound.run_graph({"x": torch.ones(2)})
