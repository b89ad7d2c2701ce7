"""What torch runs: bf16 inside, fp32 at its edges, the same bytes every time, and nothing of this machine."""

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exportedfiles as files
import numpy as np
import pytest
import scriptedmodels
import torch
from architectures import Cnn, Counting, Mlp, seeded
from peaks import measured_alone
from scriptedmodels import Encoder, How, save
from torch import nn

from bf16kit.converter.read import scripted
from bf16kit.converter.read.onnx_export import adapt
from bf16kit.converter.write import TRACED
from bf16kit.converter.write.script import narrow_script
from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.tensors import Array, TensorSpec
from bf16kit.runtime import scriptgraph
from bf16kit.runtime.torchruntimes import TorchExportRuntime, TorchScriptRuntime, load_module

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")  # torch.jit raises it itself

X = (TensorSpec("x", "float32", ("batch", 16)),)
STEPS = (TensorSpec("x", "float32", ("batch", 3, 16)),)
IDS = (TensorSpec("ids", "int64", ("batch", "seq")),)
IMAGE = (TensorSpec("image", "float32", ("batch", 3, 16, 16)),)
ROOT = str(Path(__file__).parents[3]).encode()

formats = pytest.mark.parametrize("format", ["torchscript", "pt2"])
on_any_cpu = pytest.mark.parametrize("native", [True, False])  # with bf16 instructions, or computing in fp32


def write(path: Path, module: nn.Module, inputs: tuple[TensorSpec, ...], format: str = "torchscript") -> None:
    TRACED[format].write(adapt(module, inputs), path)


def run(path: Path, specs: tuple[TensorSpec, ...], feed: Array, native: bool = True) -> Array:
    """Return the output of the file at ``path``, which is a program if its name says so."""
    runtime = TorchExportRuntime if path.suffix == ".pt2" else TorchScriptRuntime
    output = (TensorSpec("output", "float32", tuple("abcd")),)
    found = runtime(path, specs, output, native_bf16=native).run({specs[0].name: feed})["output"]
    assert found.dtype == np.float32
    return found


def distance(found: Array, module: Callable[..., Any], feed: Array) -> float:
    with torch.no_grad():
        expected = module(torch.from_numpy(feed)).numpy()
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def dtypes(path: Path) -> dict[str, torch.dtype]:
    module: nn.Module = torch.jit.load(path)  # type: ignore[no-untyped-call]  # torch has it untyped
    return {name.removeprefix("module.module."): tensor.dtype for name, tensor in module.state_dict().items()}


class Versioned(Mlp):
    """Read as a file of an older version, integers are divided with truncation, and gelu's argument is unknown."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(nn.functional.gelu(self.up(x), approximate="tanh")) * (torch.arange(10) / 4)
        return result


@formats
@on_any_cpu
@pytest.mark.parametrize(("build", "inputs"), [(Versioned, X), (Cnn, IMAGE)])
def test_outputs_are_fp32_and_within_bf16s_rounding(
    tmp_path: Path, format: str, native: bool, build: Callable[[], nn.Module], inputs: tuple[TensorSpec, ...]
) -> None:
    write(tmp_path / f"m.{format}", seeded(build()), inputs, format)
    shape = [5 if isinstance(dim, str) else dim for dim in inputs[0].shape]
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    assert 0 < distance(run(tmp_path / f"m.{format}", inputs, x, native), seeded(build()), x) < 1e-2


def test_matrices_are_bf16_and_the_parameters_of_norms_are_not(tmp_path: Path) -> None:
    write(tmp_path / "m.pt", seeded(Cnn()), IMAGE)
    found = dtypes(tmp_path / "m.pt")
    assert found["features.0.weight"] is torch.bfloat16
    assert found["head.bias"] is torch.bfloat16  # Linear needs weight and bias of one dtype
    assert found["features.1.weight"] is found["features.1.running_var"] is torch.float32


@pytest.mark.long
@formats
def test_the_same_model_gives_the_same_bytes_whatever_was_written_before(tmp_path: Path, format: str) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, seeded(Cnn()), IMAGE, format)
        write(tmp_path / f"{name}-other", seeded(Mlp()), X, format)
    data = (tmp_path / "a").read_bytes()
    assert data == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a-other", "b", "b-other"]
    assert ROOT not in data
    assert b"site-packages" not in data
    if format == "pt2":
        assert b"autocast" not in data
        assert files.records(data)["data/sample_inputs/model.pt"] == b""


class Picky(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.up.weight.dtype is not torch.float32:
            raise TypeError("float32 or nothing")
        return super().forward(x)


class Branching(Mlp):
    """A module that branches on values, which a program cannot."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


class Filling(Mlp):
    """A module that fills a tensor which a trace makes a constant: requests at once would fill the same one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = torch.tensor([0.0])
        mean[0] = x.mean()
        return super().forward(x - mean)


@pytest.mark.parametrize(
    ("module", "format", "said"),
    [
        (Picky, "torchscript", "torch cannot trace the model in bf16: TypeError: float32 or nothing"),
        (Branching, "pt2", "torch cannot export the model in bf16: "),
        (Counting, "pt2", "it changes its own buffer or input 'count'"),
        (Counting, "torchscript", "torch cannot trace the model in bf16: it changes its own 'count'"),
        (Filling, "torchscript", "torch cannot trace the model in bf16: it changes a constant tensor, made only once"),
    ],
)
def test_a_module_that_torch_cannot_write_is_reported_and_no_file_is_left(
    tmp_path: Path, module: Callable[[], nn.Module], format: str, said: str
) -> None:
    with pytest.raises(ConversionError, match=said):
        write(tmp_path / "m", module(), X, format)
    assert list(tmp_path.iterdir()) == []


class Recurrent(nn.Module):
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


class Paired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Bilinear(16, 16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.pair(x, x), None


@on_any_cpu
@pytest.mark.parametrize(
    ("layer", "format"),
    [
        (lambda: nn.LSTM(16, 16, batch_first=True), "torchscript"),
        (lambda: nn.LSTM(16, 16, batch_first=True), "pt2"),
        (Stepped, "torchscript"),
        (Paired, "torchscript"),
    ],
)
def test_recurrent_and_bilinear_layers_stay_fp32_among_bf16_ones(
    tmp_path: Path, layer: Callable[[], nn.Module], format: str, native: bool
) -> None:
    """On many CPUs torch has no bf16 kernel for them, or autocast does not cast for it: the module would not run."""
    module, path = seeded(Recurrent(layer())), tmp_path / f"m.{format}"
    x = np.random.default_rng(0).standard_normal((4, 3, 16)).astype(np.float32)
    write(path, module, STEPS, format)
    assert distance(run(path, STEPS, x, native), module, x) < 2e-2
    if format == "torchscript":
        assert all((dtype is torch.float32) == ("layer" in name) for name, dtype in dtypes(path).items())


@pytest.mark.parametrize("fails", [False, True])
def test_the_source_module_is_unchanged_afterwards(
    tmp_path: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the trace, norms and tables get hooks and matrices are rounded; all of that is undone."""
    module = seeded(torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)))
    model = adapt(module, IDS)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in module.state_dict().items()}
    if fails:
        monkeypatch.setattr(torch.jit, "save", lambda *_: 1 / 0)
    with torch.no_grad():
        expected = model.module(*model.example)[0]
        with pytest.raises(ConversionError, match="ZeroDivisionError") if fails else contextlib.nullcontext():
            TRACED["torchscript"].write(model, tmp_path / "m.pt")
        assert torch.equal(model.module(*model.example)[0], expected)
    for name, tensor in module.state_dict().items():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])
    hooks = [(part._forward_hooks, part._forward_pre_hooks) for part in module.modules()]  # noqa: SLF001 -- torch lists them nowhere
    assert not any(itertools.chain(*hooks))


class Attended(Mlp):
    """Like a LightningModule: ``trainer`` raises unless ``_jit_is_scripting`` shows that torch reads it."""

    _jit_is_scripting = False

    @property
    def trainer(self) -> None:
        if not self._jit_is_scripting:
            raise RuntimeError("not attached to a Trainer")


def test_a_lightning_module_is_traced_without_its_trainer(tmp_path: Path) -> None:
    write(tmp_path / "m.pt", seeded(Attended()), X)
    assert not Attended._jit_is_scripting  # noqa: SLF001 -- torch calls it so


_SCRIPTED_AGAIN = """
import os
import sys
import warnings
from pathlib import Path
import torch
from architectures import Cnn, Mlp, seeded
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.converter.write import TRACED
from bf16kit.converter.read.onnx_export import adapt
warnings.simplefilter("ignore")
os.chdir(sys.argv[1])
made = [torch.jit.script(seeded(Cnn())), torch.jit.script(seeded(Mlp()))]
for name in ("a.pt", "b.pt"):
    TRACED["torchscript"].write(adapt(seeded(Mlp()), (TensorSpec("x", "float32", ("batch", 16)),)), Path(name))
    del made
    made = [torch.jit.script(seeded(Cnn())), torch.jit.script(seeded(Mlp()))]
    torch.jit.freeze(made[0].eval())
    torch.jit.save(made[1], "s.pt")
"""


@pytest.mark.long
def test_modules_may_be_scripted_before_and_after(tmp_path: Path) -> None:
    """The process must not crash: torch kept types of classes that it had dropped, and read freed memory later."""
    measured_alone(_SCRIPTED_AGAIN, str(tmp_path))


class TestTorchScriptSource:
    """A TorchScript source is narrowed in its own graph: weights of products in bf16, all else unchanged."""

    @pytest.mark.parametrize("how", ["scripted", "traced", "frozen"])
    @on_any_cpu
    def test_outputs_are_within_bf16s_rounding_at_sizes_it_was_not_saved_with(
        self, tmp_path: Path, how: How, native: bool
    ) -> None:
        script = scripted.load(save(tmp_path / "m.pt", Encoder(), torch.zeros(2, 7, dtype=torch.long), how))
        before = {name: tensor.clone() for name, tensor in script.state_dict().items()}
        narrow_script(script, tmp_path / "bf16.pt")
        ids = np.arange(20).reshape(5, 4)
        assert 0 < distance(run(tmp_path / "bf16.pt", IDS, ids, native), script, ids) < 1e-2
        assert all(torch.equal(tensor, before[name]) for name, tensor in script.state_dict().items())

    def test_matrices_are_bf16_and_the_parameters_of_norms_are_not(self, tmp_path: Path) -> None:
        narrow_script(scripted.load(save(tmp_path / "m.pt", Cnn(), torch.ones(2, 3, 16, 16))), tmp_path / "bf16.pt")
        module: Any = torch.jit.load(str(tmp_path / "bf16.pt"))  # type: ignore[no-untyped-call]  # torch's own
        floats = [each for each in scriptgraph.tensors(module, module.graph) if each.is_floating_point()]
        by_dtype = {(tensor.ndim, tensor.dtype) for tensor in floats}
        assert {found for found in by_dtype if found[0] > 1} == {(4, torch.bfloat16), (2, torch.bfloat16)}
        assert (1, torch.float32) in by_dtype

    def test_a_module_that_changes_its_own_tensors_is_rejected(self, tmp_path: Path) -> None:
        """Requests that run at once would change them for each other."""
        script = scripted.load(save(tmp_path / "m.pt", Counting(), torch.ones(2, 16)))
        with pytest.raises(ConversionError, match="module to bf16: it changes its own 'count'"):
            narrow_script(script, tmp_path / "bf16.pt")

    def test_recurrent_layers_store_their_matrices_in_bf16(self, tmp_path: Path) -> None:
        x = torch.linspace(-1, 1, 96).view(2, 3, 16)
        script = scripted.load(save(tmp_path / "m.pt", scriptedmodels.Recurrent(), x))
        narrow_script(script, tmp_path / "bf16.pt")
        module = load_module(tmp_path / "bf16.pt", torch.device("cpu"))
        matrices = [each for each in scriptgraph.tensors(module, module.graph) if each.ndim > 1]
        assert {matrix.dtype for matrix in matrices} == {torch.bfloat16}
        found, expected = module(x), script(x)
        assert 0 < (found - expected).norm() / expected.norm() < 1e-2

    def test_a_module_without_products_is_rejected(self, tmp_path: Path) -> None:
        script = scripted.load(save(tmp_path / "m.pt", nn.LayerNorm(16), torch.ones(2, 16)))
        with pytest.raises(ConversionError, match="no product of the TorchScript module has an fp32 weight"):
            narrow_script(script, tmp_path / "bf16.pt")
        assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]
