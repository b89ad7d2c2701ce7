"""Lightning checkpoints: recognised by content; hyper-parameters build the model; nothing is unpickled."""

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from converting import MLP, ONNX_ONLY, Cli, tree
from lightningfiles import state, written, written_by_nano
from restored import assert_restored

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.read import torch_file
from bf16kit.converter.read.bareweights import choose, factory_arguments, is_lightning
from bf16kit.converter.read.detect import Kind, recognise
from bf16kit.messages.errors import SourceError


def _load(path: Path, *, trust_code: bool = False) -> Any:
    loaded = torch_file.load(path, Kind.LIGHTNING, trust_code=trust_code)
    assert is_lightning(loaded)
    return loaded


def _arrays(prefix: str = "", seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    return {name: tensor.numpy() for name, tensor in state(prefix, seed=seed).items()}


@pytest.mark.long
def test_a_checkpoint_of_bigdl_nano_is_converted_without_its_loss(cli: Cli, tmp_path: Path, target: Path) -> None:
    path = written_by_nano(tmp_path / "nano.ckpt", state())
    done = cli("checkpoint", path, *MLP, *ONNX_ONLY, "--out", target).published()
    said = " ".join(done.out.split())
    assert "Lightning 1.6.4, epoch 2, global step 12" in said
    assert "tensors that the model does not use, stored only for restore: loss.weight" in said
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert_restored(tmp_path / "fp32.safetensors", _arrays("model.") | {"loss.weight": np.ones(10, np.float32)})


@pytest.mark.long
def test_other_weights_in_the_file_are_reported_and_can_be_chosen(cli: Cli, tmp_path: Path, target: Path) -> None:
    averaging = {"current_model_state": state(seed=2), "averaging_state": {"n_averaged": torch.tensor(9)}}
    path = written(tmp_path / "m.ckpt", state(seed=1), **averaging)
    loaded = _load(path)
    assert choose(loaded, None)[0] is loaded["state_dict"]
    assert "under 'current_model_state'; --weights KEY takes those" in choose(loaded, None)[2][1]
    command = ("checkpoint", path, *MLP, *ONNX_ONLY, "--weights", "current_model_state", "--out", target)
    cli(*command).published()
    cli("restore", target, "--out", tmp_path / "trained.safetensors").published()
    assert_restored(tmp_path / "trained.safetensors", _arrays(seed=2))
    assert Artifact.open(target).manifest.options["weights"] == "current_model_state"


@pytest.mark.parametrize(
    ("more", "arguments", "said"),
    [
        ({"state_dict": {}}, [], "is a Lightning checkpoint whose state_dict holds no tensors"),
        ({"hyper_parameters": {"hidden": "many"}}, [], "--model architectures:Mlp: the factory failed: TypeError"),
        ({}, ["--weights", "teacher"], "no tensor of the model has the prefix 'teacher.'; found: ''"),
    ],
)
def test_a_checkpoint_that_is_rejected_leaves_no_file_behind(
    cli: Cli, tmp_path: Path, target: Path, more: dict[str, Any], arguments: list[str], said: str
) -> None:
    path = written(tmp_path / "m.ckpt", state(), **more)
    cli("checkpoint", path, *MLP, *arguments, "--out", target).refused(2, said)
    assert tree(tmp_path) == ["m.ckpt"]


def test_a_module_that_needs_lightning_is_rejected_with_the_install_command(
    cli: Cli, tmp_path: Path, target: Path, monkeypatch: Any
) -> None:
    (tmp_path / "needing_lightning.py").write_text("import lightning\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "lightning", None)  # as if it were not installed
    path = written(tmp_path / "m.ckpt", state())
    cli("checkpoint", path, "--model", "needing_lightning:Lit", "--out", target).refused(
        2, "cannot import needing_lightning: ModuleNotFoundError", "pip install 'bf16kit[lightning]'"
    )


def test_a_lightning_checkpoint_is_recognised_by_its_keys_not_its_name(tmp_path: Path) -> None:
    assert recognise(written(tmp_path / "m.safetensors", state())) is Kind.LIGHTNING
    torch.save({"state_dict": state(), "epoch": 3}, tmp_path / "plain.ckpt")
    assert recognise(tmp_path / "plain.ckpt") is Kind.TORCH_ZIP


@pytest.mark.long
def test_a_state_dict_that_only_mentions_lightning_is_read_as_any_other(cli: Cli, tmp_path: Path, target: Path) -> None:
    torch.save(state() | {"pytorch-lightning_version": "2.6.6"}, tmp_path / "m.pt")
    assert recognise(tmp_path / "m.pt") is Kind.LIGHTNING
    cli("checkpoint", tmp_path / "m.pt", *MLP, *ONNX_ONLY, "--out", target).published()
    assert Artifact.open(target).manifest.source.format == "torch"
    torch.save({"state_dict": state(), "written by": "a pytorch-lightning_version of old"}, tmp_path / "m.pt")
    assert not is_lightning(torch_file.load(tmp_path / "m.pt", Kind.LIGHTNING, trust_code=False))


def test_hyper_parameters_that_need_a_pickle_are_named_and_not_built(tmp_path: Path) -> None:
    """``collections.deque`` would be harmless, but the reader constructs only classes that it knows."""
    path = written(tmp_path / "m.ckpt", state(), hyper_parameters={"root": Path("/d"), "queue": collections.deque([1])})
    with pytest.raises(
        SourceError, match=r"\(collections.deque, pathlib(\._local)?.PosixPath\).*save_hyperparameters\(ignore"
    ) as refused:
        _load(path)
    assert "--trust-code" in str(refused.value)
    assert _load(path, trust_code=True)["hyper_parameters"]["root"] == Path("/d")


def test_tensors_that_an_average_lacks_come_from_the_weights_if_their_names_are_the_same(tmp_path: Path) -> None:
    average = {name: tensor for name, tensor in state(seed=5).items() if name != "down.bias"}
    weights = choose(_load(written(tmp_path / "m.ckpt", state(), ema=average)), "ema")[0]
    np.testing.assert_array_equal(weights["down.bias"], _arrays()["down.bias"])
    np.testing.assert_array_equal(weights["up.bias"], _arrays(seed=5)["up.bias"])
    loaded = _load(written(tmp_path / "m.ckpt", state(), ema=state("shadow.", seed=5)))
    assert choose(loaded, "ema")[0].keys() == state("shadow.").keys()


def takes_two(width: int, depth: int = 1) -> None: ...
def takes_all(width: int, **others: Any) -> None: ...
def takes_one_mapping(config: dict[str, Any], depth: int = 1) -> None: ...
def takes_by_position(width: int, /) -> None: ...


FOUND = {"width": 8, "rate": 0.1}
_GIVEN = "hyper-parameters of the file passed to --model"
_LEFT = "hyper-parameters of the file that --model does not take"


@pytest.mark.parametrize(
    ("factory", "explicit", "argument", "given", "notes"),
    [
        (takes_two, {}, "", {"width": 8}, [f"{_GIVEN}: width=8", f"{_LEFT}: rate"]),
        (takes_two, {"width": 9}, "", {"width": 9}, [f"{_LEFT}: rate"]),
        (takes_two, {"depth": 2}, "kwargs", {"width": 8, "depth": 2}, [f"{_GIVEN}: width=8", f"{_LEFT}: rate"]),
        (takes_all, {}, "", FOUND, [f"{_GIVEN}: width=8, rate=0.1"]),
        (takes_one_mapping, {}, "config", {"config": FOUND}, [f"{_GIVEN}: config={FOUND}"]),
        (takes_one_mapping, {"config": {}}, "config", {"config": {}}, []),
        (takes_by_position, {}, "", {}, [f"{_LEFT}: width, rate"]),
    ],
)
def test_the_factory_gets_the_arguments_that_its_signature_takes(
    factory: Any, explicit: dict[str, Any], argument: str, given: dict[str, Any], notes: list[str]
) -> None:
    loaded = {"hparams_name": argument, "hyper_parameters": FOUND | {"_class_path": "a.B", 3: 4}}
    assert factory_arguments(factory, explicit, loaded) == (given, notes)
