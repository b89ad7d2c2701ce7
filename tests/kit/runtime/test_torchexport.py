"""torch.export programs on the CPU, in bf16 and widened to fp32. The tests export them as the converter does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import exportedfiles as files
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.export.passes import move_to_device_pass

from bf16kit.messages.errors import DeviceUnavailable, RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.torchexport import TorchExportRuntime, load_program

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


def test_tied_weights_are_widened_once(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (torch.nn.Linear(16, 16, bias=False, dtype=torch.bfloat16) for _ in range(2))
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.second(self.first(x.to(torch.bfloat16))).float())

    runtime = TorchExportRuntime(written(tmp_path, Tied()), [X], [Y], native_bf16=False)
    module = getattr(runtime._call, "__self__")  # noqa: B009 - the module, behind its bound method
    assert {tensor.dtype for tensor in module.parameters()} == {torch.float32}
    assert len({tensor.data_ptr() for tensor in module.parameters()}) == 1


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


def test_several_threads_may_load_programs(tmp_path: Path) -> None:
    """torch's own loader fails for the second of two threads."""
    path = written(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: TorchExportRuntime(path, [X], [Y], native_bf16=False), range(8)))
    assert all(np.array_equal(each.run({"x": rows()})["y"], loaded[0].run({"x": rows()})["y"]) for each in loaded)


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


def test_a_program_of_other_outputs_fails_with_their_number(tmp_path: Path) -> None:
    runtime = TorchExportRuntime(written(tmp_path), [X], [Y, X])
    with pytest.raises(RuntimeFailure, match="gives 1 outputs, expected 2: y, x"):
        runtime.run({"x": rows()})


@pytest.mark.parametrize("content", [b"", b"text named .pt2", b"PK\x03\x04 not a whole archive"])
def test_a_file_that_is_not_a_program_is_a_runtime_failure(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.pt2").write_bytes(content)
    with pytest.raises(RuntimeFailure, match=r"torch\.export cannot load m\.pt2: "):
        TorchExportRuntime(tmp_path / "m.pt2", [X], [Y])


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
