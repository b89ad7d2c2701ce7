"""TorchScript files through the whole command: converted, run, and compared with the files themselves."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
from architectures import Cnn, Mlp, Tied, seeded
from converting import ONNX_ONLY, Cli, tree
from numpy.typing import NDArray
from restored import assert_restored
from scriptedmodels import Deciding, Encoder, How, Looping, Named, Recurrent, save
from torch import nn

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.read import scripted, torch_file
from bf16kit.messages.errors import SourceError
from bf16kit.runtime.loading import load, load_reference

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")  # torch.jit's own

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
IDS = torch.arange(21).reshape(3, 7)
_INPUT = ["--input", "x:float32:batch,16"]
_BOTH = ("--format", "onnx", "--format", "torchscript")
_CASES: dict[str, tuple[type[nn.Module], How, str, torch.Tensor]] = {
    "frozen convolutions": (Cnn, "frozen", "x:float32:batch,3,16,16", IMAGES),
    "a scripted transformer": (Encoder, "scripted", "ids:int64:batch,seq", IDS),
    "a scripted loop": (Looping, "scripted", "x:float32:batch,16", X),
}


@pytest.mark.long
@pytest.mark.parametrize("case", _CASES)
def test_an_artifact_gives_the_outputs_of_its_file(cli: Cli, tmp_path: Path, target: Path, case: str) -> None:
    make, how, given, x = _CASES[case]
    path = save(tmp_path / "m.pt", make(), x[:2], how)
    itself: Any = torch.jit.load(str(path))  # type: ignore[no-untyped-call]  # torch's own
    with torch.no_grad():
        expected = itself(x).numpy()
    cli("checkpoint", path, "--input", given, "--trust-code", *_BOTH, "--out", target).published()
    artifact, feed = Artifact.open(target), {given.partition(":")[0]: x.numpy()}
    assert artifact.manifest.source.format == "torchscript"
    assert "torchscript" in artifact.manifest.profiles
    np.testing.assert_allclose(load_reference(artifact).run(feed)["output"], expected, atol=1e-5)
    for profile in ("cpu", "torchscript"):
        answered = load(artifact, profile).run(feed)["output"]
        assert 0 < np.linalg.norm(answered - expected) / np.linalg.norm(expected) < 1.5e-2, profile
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert_restored(tmp_path / "fp32.safetensors", _arrays(path))


class Scored(NamedTuple):
    scores: torch.Tensor
    embedding: torch.Tensor


class Tupled(Named):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Scored:  # type: ignore[override]
        return Scored(self.left(a) + self.right(b), torch.tanh(self.left(a) + self.shift))


@pytest.mark.long
@pytest.mark.parametrize("make", [Named, Tupled])
def test_inputs_are_matched_by_name_and_outputs_are_named_by_their_keys_or_fields(
    cli: Cli, tmp_path: Path, target: Path, make: type[nn.Module]
) -> None:
    path = save(tmp_path / "m.pt", make(), (X[:2], X[:2]))
    inputs = ("--input", "b:float32:batch,16", "--input", "a:float32:batch,16", "--trust-code")
    cli("checkpoint", path, *inputs, *_BOTH, "--out", target).published()
    artifact = Artifact.open(target)
    with torch.no_grad():
        expected = seeded(Named())(X, 2 * X)
    for profile in ("cpu", "torchscript"):
        answered = load(artifact, profile).run({"a": X.numpy(), "b": 2 * X.numpy()})
        assert answered.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_allclose(answered[name], tensor.numpy(), atol=0.1)


class HalfInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.narrow, self.after = nn.Linear(16, 64), nn.Linear(64, 64).half(), Mlp(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.after(torch.relu(self.narrow(self.before(x).half())).float())
        return result


@pytest.mark.long
def test_fp16_parts_stay_so_and_may_differ_from_torch_by_their_own_rounding(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    path = save(tmp_path / "m.pt", HalfInside(), X[:2])
    cli("checkpoint", path, *_INPUT, "--trust-code", *ONNX_ONLY, "--out", target).published()
    with torch.no_grad():
        expected = seeded(HalfInside())(X).numpy()
    answered = load(Artifact.open(target), "cpu").run({"x": X.numpy()})["output"]
    assert 0 < np.linalg.norm(answered - expected) / np.linalg.norm(expected) < 1.5e-2


class WholeNumbers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.mark.parametrize(
    ("make", "arguments", "code", "said"),
    [
        (Mlp, [], 2, "--input NAME:DTYPE:DIMS"),
        (Mlp, [*_INPUT, "--input", "y:float32:batch"], 2, "--input: given 2 times, but the module takes 1: x"),
        (Mlp, ["--input", "x:float32:batch,17"], 3, "on an example input (x[2, 17]): RuntimeError: mat1 and mat2"),
        (Deciding, _INPUT, 3, "no ONNX graph can be made of it: prim::If depends on values in a tensor"),
        (WholeNumbers, _INPUT, 3, "holds no fp32 weights, so there is nothing to convert"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_converted_is_rejected_with_the_reason(
    cli: Cli, tmp_path: Path, target: Path, make: type[nn.Module], arguments: list[str], code: int, said: str
) -> None:
    path = save(tmp_path / "m.pt", make(), X[:2])
    cli("checkpoint", path, *arguments, "--trust-code", *ONNX_ONLY, "--out", target).refused(code, said)
    assert tree(tmp_path) == ["m.pt"]


@pytest.mark.long
def test_a_program_is_not_loaded_unless_its_author_is_trusted(cli: Cli, tmp_path: Path, target: Path) -> None:
    path = save(tmp_path / "m.pt", Mlp(), X[:2])
    said = ("m.pt: is a TorchScript file", "whoever writes it decides what runs", "pass --trust-code if you trust them")
    cli("checkpoint", path, *_INPUT, "--out", target).refused(2, *said)
    cli("checkpoint", path, *_INPUT, "--out", target, "--trust-pickle", *ONNX_ONLY).published()  # the option's old name


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    return torch_file.to_numpy(path, scripted.tensors(scripted.load(path)))


@pytest.mark.parametrize("how", get_args(How))
def test_every_tensor_is_found_bit_for_bit(tmp_path: Path, how: How) -> None:
    path = save(tmp_path / "m.pt", Cnn(), torch.ones(2, 3, 16, 16), how)
    found = _arrays(path)
    state = {name: tensor.numpy() for name, tensor in seeded(Cnn()).state_dict().items()}
    if how != "frozen":
        assert found.keys() == state.keys()
        for name, array in state.items():
            np.testing.assert_array_equal(found[name], array)
    else:  # BatchNorm is folded by torch.jit.freeze itself
        assert sorted(found) == [f"constants.{number}" for number in range(len(found))]
        assert any(np.array_equal(array, state["head.weight"]) for array in found.values())


def test_each_tensor_is_found_once_under_every_name_that_it_has(tmp_path: Path) -> None:
    """Recurrent layers have a list of parameters beside the parameters; two places may use one constant."""
    example: Any = (torch.ones(2, 16), torch.ones(2, 16))
    found = scripted.tensors(scripted.load(save(tmp_path / "named.pt", Named(), example)))
    assert set(found) == {"left.weight", "left.bias", "right.weight", "right.bias", "shift"}
    assert found["left.weight"].data_ptr() == found["right.weight"].data_ptr()
    script = scripted.load(save(tmp_path / "list.pt", Recurrent(), torch.ones(2, 7, 16)))
    assert scripted.tensors(script).keys() == script.state_dict().keys()
    path = save(tmp_path / "tied.pt", Tied(), torch.zeros(2, 3, dtype=torch.long), "frozen")
    assert sorted(tensor.ndim for tensor in scripted.tensors(scripted.load(path)).values()) == [1, 2, 2]


def test_damage_is_noticed(tmp_path: Path) -> None:
    mlp = save(tmp_path / "m.pt", Mlp(), torch.ones(2, 16))
    whole = mlp.read_bytes()
    with zipfile.ZipFile(mlp) as archive:
        weight = archive.read("m/data/0")
    mlp.write_bytes(whole[: int(len(whole) * 0.7)])
    with pytest.raises(SourceError, match=r"m\.pt: is a truncated or damaged zip archive"):
        scripted.load(mlp)
    mlp.write_bytes(whole.replace(weight, b"\x01" + weight[1:]))
    with pytest.raises(SourceError, match=r"m\.pt: damaged: its record 'm/data/0' has other bytes than were written"):
        scripted.load(mlp)


def _of_its_sum(x: torch.Tensor) -> torch.Tensor:
    return -x if bool(x.sum() > 0) else x


def _of_its_size(x: torch.Tensor) -> torch.Tensor:
    return -x if x.size(0) > 2 else x


def _by_its_size(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(int(x.size(0) * x.size(1)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("made", "decides"),
    [
        (lambda: torch.jit.script(_of_its_sum), True),
        (lambda: torch.jit.script(_of_its_size), False),
        (lambda: torch.jit.trace(_by_its_size, torch.ones(2, 3)), False),  # type: ignore[no-untyped-call]  # sizes are tensors
    ],
)
def test_decisions_by_numbers_and_by_sizes_are_distinguished(made: Callable[[], Any], decides: bool) -> None:
    assert scripted.decides_by_numbers(made()) is decides
