"""Which weights are trained, and which are rounded: exactly those that the artifact rounds, BatchNorm folded in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import Cnn, Mlp, Tied, save
from numpy.typing import NDArray

from bf16kit.artifact.artifact import Artifact
from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.rounding import to_bf16
from converter.cli import run
from converter.recovery.weights import (
    TrainedParameter,
    copy_to_module,
    digest,
    find_trainable,
    recovered_tensors,
    rounded,
    straight_through,
)

Arrays = dict[str, NDArray[Any]]


def _converted(source: Path, target: Path, *flags: str) -> Artifact:
    flags = (*flags, "--format", "onnx", "--profile", "cpu", "--no-report", "--no-search", "--allow-over-budget")
    assert run(["checkpoint", str(source), "--out", str(target), *flags]) == 0
    return Artifact.open(target)


def _checkpoint(module: torch.nn.Module) -> Arrays:
    return {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}


@pytest.fixture(scope="module")
def cnn(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Artifact]:
    module, root = Cnn(), tmp_path_factory.mktemp("cnn")
    flags = ("--model", "architectures:Cnn", "--input", "image:float32:batch,3,16,16")
    return module, _converted(save(root / "cnn.pt", module), root / "cnn" / "1", *flags)


@pytest.fixture(scope="module")
def trained(cnn: tuple[torch.nn.Module, Artifact]) -> dict[str, TrainedParameter]:
    module, artifact = cnn
    return {entry.names[0]: entry for entry in find_trainable(module, _checkpoint(module), artifact)}


def test_the_rounded_weights_are_those_that_the_artifact_holds_in_bf16(
    cnn: tuple[torch.nn.Module, Artifact], trained: dict[str, TrainedParameter]
) -> None:
    """BatchNorm is folded into the convolutions: the products of weights and factors are rounded, not the weights."""
    module, artifact = cnn
    parameters = dict(module.named_parameters())
    narrow = [name for name, entry in trained.items() if entry.rounds]
    assert sorted(narrow) == ["features.0.weight", "features.3.weight"]  # the head's 160 weights are too few
    for name in narrow:
        scale = trained[name].scale
        assert scale is not None
        stored = artifact.tensor(name).astype(np.float64)
        held = rounded(parameters[name].detach(), scale).double() * scale
        np.testing.assert_allclose(held.numpy(), stored, rtol=2**-23)


def test_batchnorms_factors_are_not_trained_but_its_shifts_are(trained: dict[str, TrainedParameter]) -> None:
    """The product of weight and factor is rounded; training the factor as well would change the rounded product."""
    assert not {"features.1.weight", "features.4.weight"} & trained.keys()
    assert {"features.1.bias", "features.4.bias", "features.3.bias", "head.weight", "head.bias"} <= trained.keys()


def test_converting_the_trained_weights_again_loses_nothing(
    cnn: tuple[torch.nn.Module, Artifact], trained: dict[str, TrainedParameter], tmp_path: Path
) -> None:
    module, artifact = cnn
    checkpoint = _checkpoint(module)
    state = {name: tensor * 1.01 if "weight" in name else tensor for name, tensor in module.state_dict().items()}
    tensors = recovered_tensors(checkpoint, tuple(trained.values()), state)
    assert tensors.keys() == checkpoint.keys()
    assert np.array_equal(tensors["features.1.running_var"], checkpoint["features.1.running_var"])
    again = Cnn()
    again.load_state_dict({name: torch.from_numpy(array) for name, array in tensors.items()})
    torch.save(again.state_dict(), tmp_path / "again.pt")
    flags = ("--model", "architectures:Cnn", "--input", "image:float32:batch,3,16,16")
    written = _converted(tmp_path / "again.pt", tmp_path / "m" / "1", *flags)
    for name in ("features.0.weight", "features.3.weight"):
        entry = trained[name]
        assert entry.scale is not None
        product = (torch.from_numpy(tensors[name]).double() * entry.scale).float().numpy()
        np.testing.assert_array_equal(to_bf16(product), written.tensor(name))
        np.testing.assert_allclose(product, written.tensor(name).astype(np.float32), rtol=2**-22)
    worst = written.manifest.drift["cpu"].outputs["output"]["relative_l2"]["worst"]
    assert worst < 1e-5 < artifact.manifest.drift["cpu"].outputs["output"]["relative_l2"]["worst"]


def test_the_gradient_passes_as_if_nothing_had_been_rounded() -> None:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    given = torch.arange(64.0).reshape(8, 8)
    held = straight_through(weight, None)
    torch.autograd.backward((held * given).sum())
    assert weight.grad is not None
    assert torch.equal(weight.grad, given)
    assert torch.equal(held.detach(), weight.detach().bfloat16().float())
    assert not torch.equal(held.detach(), weight.detach())


def test_tied_weights_are_one_parameter_with_all_its_names(tmp_path: Path) -> None:
    module = Tied()
    artifact = _converted(
        save(tmp_path / "tied.pt", module), tmp_path / "m" / "1",
        *("--model", "architectures:Tied", "--input", "ids:int64:batch,seq"),
    )  # fmt: skip
    found = {entry.names: entry for entry in find_trainable(module, _checkpoint(module), artifact)}
    tied = found["table.weight", "out.weight"]
    assert set(tied.tensors) == {"table.weight", "out.weight"}
    assert tied.rounds
    state = dict(module.state_dict()) | {"table.weight": torch.ones(64, 16)}
    tensors = recovered_tensors(_checkpoint(module), tuple(found.values()), state)
    assert np.array_equal(tensors["table.weight"], tensors["out.weight"])
    copy_to_module(module, tuple(found.values()), tensors)
    assert module.out.weight[0, 0].item() == 1.0


def test_parameters_with_equal_values_are_distinguished_by_name(mlp: Artifact, mlp_file: Path) -> None:
    """Most models have two biases of zeros before training."""
    module, checkpoint = Mlp(hidden=10), {}
    for name, tensor in module.state_dict().items():
        checkpoint[f"model.{name}"] = np.zeros(tuple(tensor.shape), np.float32)
    module.load_state_dict({name.removeprefix("model."): torch.from_numpy(a) for name, a in checkpoint.items()})
    from converter.recovery.weights import _by_values, _digest, _holders

    index = _by_values(checkpoint)
    zeros = index[_digest(np.zeros(10, np.float32))]
    assert sorted(zeros) == ["model.down.bias", "model.up.bias"]
    assert _holders(["module.up.bias"], zeros) == ["model.up.bias"]
    assert _holders(["module.shift"], zeros) == []  # neither name matches, and the converter does not guess


def test_a_module_without_the_checkpoints_weights_is_rejected(mlp: Artifact) -> None:
    module = Mlp()
    other = {name: array + 1 for name, array in _checkpoint(module).items()}
    with pytest.raises(ConversionError, match=r"nothing to train: .* --bf16 REGEX makes more of them bf16"):
        find_trainable(module, other, mlp)


def test_the_digest_is_of_names_dtypes_shapes_and_bytes() -> None:
    one: Arrays = {"a": np.ones((2, 3), np.float32), "b": np.zeros(2, np.int64)}
    assert digest(one) == digest(dict(reversed(one.items())))
    others: list[Arrays] = [
        {**one, "a": np.ones((3, 2), np.float32)},
        {**one, "b": np.zeros(2, np.uint64)},
        {"c": one["a"], "b": one["b"]},
        {**one, "b": np.array([0, 1])},
    ]
    assert len({digest(other) for other in (one, *others)}) == 5
