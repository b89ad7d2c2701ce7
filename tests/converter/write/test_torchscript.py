"""The TorchScript module has bf16 inside, fp32 at its edges, and the same bytes every time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import Cnn, Mlp, seeded
from torch import nn

from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.torchscript import TorchScriptRuntime
from converter.read.torch.onnx_export import adapt
from converter.write.torchscript import narrow_and_trace, rewrite_archive

X = (TensorSpec("x", "float32", ("batch", 16)),)
Y = (TensorSpec("output", "float32", ("batch", 10)),)
IDS = (TensorSpec("ids", "int64", ("batch", "seq")),)
IMAGE = (TensorSpec("image", "float32", ("batch", 3, 16, 16)),)


def state_dict(path: Path) -> dict[str, torch.Tensor]:
    with pytest.warns(DeprecationWarning, match=r"torch\.jit\.load"):
        module: torch.nn.Module = torch.jit.load(path)  # type: ignore[no-untyped-call]  # torch has it untyped
    return module.state_dict()


@pytest.mark.parametrize("native", [True, False])
def test_inputs_and_outputs_are_fp32_and_the_output_is_within_bf16s_rounding(tmp_path: Path, native: bool) -> None:
    module = seeded(Mlp())
    x = np.random.default_rng(0).standard_normal((5, 16), np.float32)
    with torch.no_grad():
        expected = module(torch.from_numpy(x)).numpy()
    path = tmp_path / "m.pt"
    narrow_and_trace(adapt(module, X), path)
    found = TorchScriptRuntime(path, X, Y, native_bf16=native).run({"x": x})["output"]
    assert found.dtype == np.float32
    assert 0 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-2


def test_matrices_are_bf16_and_the_parameters_of_norms_are_not(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    narrow_and_trace(adapt(seeded(Cnn()), IMAGE), path)
    state = state_dict(path)
    dtypes = {name.removeprefix("module.module."): tensor.dtype for name, tensor in state.items()}
    assert dtypes["features.0.weight"] is torch.bfloat16
    assert dtypes["head.bias"] is torch.bfloat16  # Linear needs weight and bias of one dtype
    assert dtypes["features.1.weight"] is torch.float32
    assert dtypes["features.1.running_var"] is torch.float32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch has deprecated TorchScript
@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x / 4, torch.tensor([1, 2, 5])),
        (lambda x: nn.functional.gelu(x, approximate="tanh"), torch.tensor([1.0, -2.0])),
    ],
    ids=["division of integers", "gelu by tanh"],
)
def test_an_archive_means_the_same_when_it_is_rewritten(
    tmp_path: Path, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> None:
    """Read as an older version, integers are divided with truncation, and gelu's argument is unknown."""
    raw, rewritten = tmp_path / "raw.pt", tmp_path / "rewritten.pt"
    torch.jit.save(torch.jit.trace(function, x), str(raw))  # type: ignore[no-untyped-call]  # torch has it untyped
    rewrite_archive(raw, rewritten)
    module: torch.nn.Module = torch.jit.load(str(rewritten))  # type: ignore[no-untyped-call]
    assert torch.equal(module(x), function(x))


def test_the_same_model_gives_the_same_bytes_whatever_was_traced_before(tmp_path: Path) -> None:
    for name in ("a", "b"):
        narrow_and_trace(adapt(seeded(Cnn()), IMAGE), tmp_path / name)
        narrow_and_trace(adapt(seeded(Mlp()), X), tmp_path / f"{name}-other")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a-other", "b", "b-other"]


def test_the_file_contains_no_paths_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    narrow_and_trace(adapt(seeded(Mlp()), X), path)
    data = path.read_bytes()
    assert str(Path(__file__).parents[3]).encode() not in data
    assert b"site-packages" not in data


def test_a_module_that_cannot_run_in_bf16_is_reported_and_no_file_is_left(tmp_path: Path) -> None:
    class Picky(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.up.weight.dtype is not torch.float32:
                raise TypeError("float32 or nothing")
            return super().forward(x)

    with pytest.raises(ConversionError, match="torch cannot trace the model in bf16: TypeError: float32 or nothing"):
        narrow_and_trace(adapt(Picky(), X), tmp_path / "m.pt")
    assert list(tmp_path.iterdir()) == []


class Recurrent(nn.Module):
    """x [batch, steps, 16] → a projection, a recurrent layer, a second projection."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.up, self.layer, self.down = nn.Linear(16, 16), layer, nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.layer(self.up(x))[0])
        return result


class Stepped(nn.Module):
    """An LSTM cell that the module calls once per step, with its state in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        state = None
        for step in range(3):
            state = self.cell(x[:, step], state)
        return state[0][:, None], None  # type: ignore[index]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("layer", [nn.LSTM(16, 16, batch_first=True), nn.GRU(16, 16, batch_first=True), Stepped()])
def test_recurrent_layers_stay_fp32_among_bf16_ones(tmp_path: Path, layer: nn.Module, native: bool) -> None:
    """On many CPUs torch has no bf16 kernel for recurrent layers, so the module would not run."""
    inputs = (TensorSpec("x", "float32", ("batch", 3, 16)),)
    module = seeded(Recurrent(layer))
    x = np.random.default_rng(0).standard_normal((4, 3, 16)).astype(np.float32)
    with torch.no_grad():
        expected = module(torch.from_numpy(x)).numpy()
    narrow_and_trace(adapt(module, inputs), tmp_path / "m.pt")
    outputs = (TensorSpec("output", "float32", expected.shape),)
    runtime = TorchScriptRuntime(tmp_path / "m.pt", inputs, outputs, native_bf16=native)
    found = runtime.run({"x": x})["output"]
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1.5e-2
    dtypes = {name: tensor.dtype for name, tensor in state_dict(tmp_path / "m.pt").items()}
    assert all((dtype is torch.float32) == ("layer" in name) for name, dtype in dtypes.items())


@pytest.mark.parametrize("fails", [False, True])
def test_the_source_module_is_unchanged_afterwards(
    tmp_path: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the trace, norms and tables get hooks and matrices are rounded; all of that is undone."""
    module = seeded(torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)))
    model = adapt(module, IDS)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        expected = model.module(*model.example)[0]
        if fails:
            monkeypatch.setattr(torch.jit, "save", lambda *_: 1 / 0)
            with pytest.raises(ConversionError, match="ZeroDivisionError"):
                narrow_and_trace(model, tmp_path / "m.pt")
        else:
            narrow_and_trace(model, tmp_path / "m.pt")
        found = model.module(*model.example)[0]
    for name, tensor in module.state_dict().items():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])
    assert torch.equal(found, expected)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


class Attended(Mlp):
    """Like a LightningModule: ``trainer`` raises unless ``_jit_is_scripting`` shows that torch reads it."""

    _jit_is_scripting = False

    @property
    def trainer(self) -> None:
        if not self._jit_is_scripting:
            raise RuntimeError("not attached to a Trainer")


def test_a_lightning_module_is_traced_without_its_trainer(tmp_path: Path) -> None:
    narrow_and_trace(adapt(seeded(Attended()), X), tmp_path / "m.pt")
    assert not Attended._jit_is_scripting


_SCRIPTED_AGAIN = """
import warnings
import os
import subprocess
import sys
from pathlib import Path
import torch
from architectures import Cnn, Mlp, seeded
from bf16kit.numerics.tensors import TensorSpec
from converter.write.torchscript import narrow_and_trace
from converter.read.torch.onnx_export import adapt
warnings.simplefilter("ignore")
made = [torch.jit.script(seeded(Cnn())), torch.jit.script(seeded(Mlp()))]
for name in ("a.pt", "b.pt"):
    narrow_and_trace(adapt(seeded(Mlp()), (TensorSpec("x", "float32", ("batch", 16)),)), Path(name))
    del made
    made = [torch.jit.script(seeded(Cnn())), torch.jit.script(seeded(Mlp()))]
    torch.jit.freeze(made[0].eval())
    torch.jit.save(made[1], "s.pt")
"""


@pytest.mark.long
def test_modules_may_be_scripted_before_and_after(tmp_path: Path) -> None:
    """The process must not crash: torch kept types of classes that it had dropped, and read freed memory later."""
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPTED_AGAIN], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, check=False
    )
    assert done.returncode == 0
