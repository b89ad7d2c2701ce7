"""Lightning checkpoints: recognised by content; hyper-parameters build the model; nothing is unpickled."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import Mlp, seeded
from converting import MLP, ONNX_ONLY, Cli, tree
from lightningfiles import SCALER, state, written, written_by_nano
from restored import assert_restored
from torch import nn

from bf16kit.artifact.artifact import Artifact
from bf16kit.messages.errors import SourceError, UsageError
from bf16kit.runtime.loading import load, load_reference
from converter.read import torch_file
from converter.read.detect import Kind, recognise
from converter.read.lightning import choose, factory_arguments, fit_behind_prefix, is_lightning, training

X = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)


def _load(path: Path, *, trust_code: bool = False) -> Any:
    loaded = torch_file.load(path, Kind.LIGHTNING, trust_code=trust_code)
    assert is_lightning(loaded)
    return loaded


def _arrays(prefix: str = "", seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    return {name: tensor.numpy() for name, tensor in state(prefix, seed=seed).items()}


# --- the whole command ------------------------------------------------------------------------------------------------


def test_a_checkpoints_hyper_parameters_build_its_model(cli: Cli, tmp_path: Path, target: Path) -> None:
    weights = state("net.", Mlp(hidden=32))
    path = written(
        tmp_path / "m.ckpt",
        weights,
        hparams_name="kwargs",
        hyper_parameters={"hidden": 32, "lr": 1e-3, "optimizer": "adam"},
    )
    done = cli("checkpoint", path, *MLP, *ONNX_ONLY, "--out", target).published()
    said = " ".join(done.out.split())
    assert "Lightning 2.6.6, epoch 2, global step 12: weights in fp32 and no gradient scaler" in said
    assert "hyper-parameters of the file passed to --model: hidden=32" in said
    assert "hyper-parameters of the file that --model does not take: lr, optimizer" in said
    assert "the model's weights are those whose names begin with 'net.'" in said
    artifact = Artifact.open(target)
    assert artifact.manifest.source.format == "lightning"
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert_restored(tmp_path / "fp32.safetensors", {name: tensor.numpy() for name, tensor in weights.items()})
    with torch.no_grad():
        expected = seeded(Mlp(hidden=32))(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(load_reference(artifact).run({"x": X})["output"], expected, atol=1e-5)
    np.testing.assert_allclose(load(artifact, "cpu").run({"x": X})["output"], expected, atol=0.05)


def test_a_checkpoint_of_bigdl_nano_is_converted_without_its_loss(cli: Cli, tmp_path: Path, target: Path) -> None:
    path = written_by_nano(tmp_path / "nano.ckpt", state(), NativeMixedPrecisionPlugin=SCALER)
    done = cli("checkpoint", path, *MLP, *ONNX_ONLY, "--out", target).published()
    said = " ".join(done.out.split())
    assert "Lightning 1.6.4, epoch 2, global step 12: trained in 16-mixed" in said
    assert "(NativeMixedPrecisionPlugin keeps the scaler)" in said
    assert "tensors that the model does not use, stored only for restore: loss.weight" in said
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert_restored(tmp_path / "fp32.safetensors", _arrays("model.") | {"loss.weight": np.ones(10, np.float32)})


def test_weights_of_bf16_true_are_stored_unchanged(cli: Cli, tmp_path: Path, target: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in state("model.").items()}
    path = written(tmp_path / "m.ckpt", weights)
    done = cli("checkpoint", path, *MLP, *ONNX_ONLY, "--out", target).published()
    assert "weights in bf16, as bf16-true trains them: rounding them loses nothing" in " ".join(done.out.split())
    cli("restore", target, "--out", tmp_path / "bf16.safetensors").published()
    import ml_dtypes

    bits = {name: tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for name, tensor in weights.items()}
    assert_restored(tmp_path / "bf16.safetensors", bits)


@pytest.mark.long
def test_averaged_weights_are_reported_and_the_trained_ones_can_be_chosen(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    """Lightning's WeightAveraging stores the average in place of the weights."""
    path = written(
        tmp_path / "m.ckpt",
        state(seed=1),
        current_model_state=state(seed=2),
        averaging_state={"n_averaged": torch.tensor(9)},
    )
    done = cli("checkpoint", path, *MLP, *ONNX_ONLY, "--out", target).published()
    assert "these are the averaged weights" in " ".join(done.out.split())
    cli("restore", target, "--out", tmp_path / "averaged.safetensors").published()
    assert_restored(tmp_path / "averaged.safetensors", _arrays(seed=1))
    cli("checkpoint", path, *MLP, *ONNX_ONLY, "--weights", "model", "--out", target, "--force").published()
    cli("restore", target, "--out", tmp_path / "trained.safetensors").published()
    assert_restored(tmp_path / "trained.safetensors", _arrays(seed=2))
    assert Artifact.open(target).manifest.options["weights"] == "model"


class Opaque:
    """A class that a hyper-parameter may have, and that a checkpoint's reader must not construct."""


_REFUSED: tuple[tuple[dict[str, Any], list[str], str], ...] = (
    (
        {"hyper_parameters": {"x": Opaque()}},
        [],
        "decides what runs, as with Triton and TorchServe; the cause is usually a hyper-parameter",
    ),
    ({"hyper_parameters": {"root": Path("/data")}}, [], "pathlib.PosixPath"),
    ({"state_dict": {}}, [], "is a Lightning checkpoint whose state_dict holds no tensors"),
    ({"hyper_parameters": {"hidden": 8}}, [], "up.weight is [64, 16] in the checkpoint, [8, 16] in the model"),
    ({"hyper_parameters": {"hidden": "many"}}, [], "--model architectures:Mlp: the factory failed: TypeError"),
    ({}, ["--weights", "ema"], "--weights ema: the checkpoint holds no averaged weights of this model"),
    ({}, ["--weights", "teacher"], "no tensor of the model has the prefix 'teacher.'; found: ''"),
    ({"state_dict": state() | {"head.weight": torch.ones(3)}}, [], "unexpected: head.weight [3]"),
    ({"state_dict": dict(list(state().items())[1:])}, [], "missing: up.weight [64, 16]"),
)


@pytest.mark.parametrize(("more", "arguments", "said"), _REFUSED)
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


def test_the_option_weights_is_rejected_for_other_sources(cli: Cli, mlp_file: Path, target: Path) -> None:
    cli("checkpoint", mlp_file, *MLP, "--weights", "ema", "--out", target).refused(2, "--weights: is for Lightning")


# --- recognition ------------------------------------------------------------------------------------------------------


def test_a_lightning_checkpoint_is_recognised_by_its_keys_not_its_name(tmp_path: Path) -> None:
    assert recognise(written(tmp_path / "m.safetensors", state())) is Kind.LIGHTNING
    torch.save({"state_dict": state(), "epoch": 3}, tmp_path / "plain.ckpt")
    assert recognise(tmp_path / "plain.ckpt") is Kind.TORCH_ZIP


def test_a_state_dict_that_only_mentions_lightning_is_read_as_any_other(cli: Cli, tmp_path: Path, target: Path) -> None:
    torch.save(state() | {"pytorch-lightning_version": "2.6.6"}, tmp_path / "m.pt")
    assert recognise(tmp_path / "m.pt") is Kind.LIGHTNING
    cli("checkpoint", tmp_path / "m.pt", *MLP, "--weights", "ema", "--out", target).refused(
        2, "--weights: is for Lightning"
    )
    cli("checkpoint", tmp_path / "m.pt", *MLP, *ONNX_ONLY, "--out", target).published()
    assert Artifact.open(target).manifest.source.format == "torch"
    torch.save({"state_dict": state(), "written by": "a pytorch-lightning_version of old"}, tmp_path / "m.pt")
    assert not is_lightning(torch_file.load(tmp_path / "m.pt", Kind.LIGHTNING, trust_code=False))


@pytest.mark.parametrize(("file", "said"), [("meta.pt", "consolidate_checkpoint"), ("zero_to_fp32.py", "DeepSpeed")])
def test_sharded_checkpoints_are_rejected_with_the_tool_that_merges_them(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).touch()
    (tmp_path / ".metadata").touch()
    with pytest.raises(SourceError, match=said):
        recognise(tmp_path)


def test_hyper_parameters_that_need_a_pickle_are_named_and_not_built(tmp_path: Path) -> None:
    """``collections.deque`` would be harmless, but the reader constructs only classes that it knows."""
    path = written(tmp_path / "m.ckpt", state(), hyper_parameters={"root": Path("/d"), "queue": collections.deque([1])})
    with pytest.raises(
        SourceError, match=r"\(collections.deque, pathlib.PosixPath\).*save_hyperparameters\(ignore"
    ) as refused:
        _load(path)
    assert "--trust-code" in str(refused.value)
    assert _load(path, trust_code=True)["hyper_parameters"]["root"] == Path("/d")


@pytest.mark.parametrize(
    ("more", "dtype", "said"),
    [
        ({}, torch.float32, "trained in 32-true or bf16-mixed, the file does not say which"),
        ({"MixedPrecision": SCALER}, torch.float32, "trained in 16-mixed, its gradients scaled"),
        ({"native_amp_scaling_state": SCALER}, torch.float32, "native_amp_scaling_state keeps the scaler"),
        ({}, torch.bfloat16, "weights in bf16, as bf16-true trains them"),
        ({}, torch.float16, "weights in fp16, as 16-true trains them"),
        ({}, torch.float64, "weights in fp64"),
    ],
)
def test_the_precision_of_training_is_reported_as_far_as_the_file_shows_it(
    tmp_path: Path, more: dict[str, Any], dtype: torch.dtype, said: str
) -> None:
    path = written(tmp_path / "m.ckpt", {name: tensor.to(dtype) for name, tensor in state().items()}, **more)
    loaded = _load(path)
    tensors = torch_file.arrays(path, Kind.LIGHTNING, loaded["state_dict"], trust_code=False)
    assert said in training(loaded, tensors)


# --- which weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"ema_state_dict": state(seed=5)}, "ema_state_dict"),
        ({"ema": state("module.", seed=5)}, "ema"),
        ({"callbacks": {"EMA{'decay': 0.99}": {"ema_weights": state(seed=5)}}}, "callbacks.EMA.ema_weights"),
        ({"callbacks": {"StochasticWeightAveraging": {"average_model_state": state("module.", seed=5)}}},
         "callbacks.StochasticWeightAveraging.average_model_state"),
    ],
)  # fmt: skip
def test_averages_of_callbacks_are_found(tmp_path: Path, more: dict[str, Any], key: str) -> None:
    loaded = _load(written(tmp_path / "m.ckpt", state(), **more))
    weights, _, notes = choose(loaded, None)
    assert notes == [f"the file also holds averaged weights under {key!r}; --weights ema takes them"]
    assert weights is loaded["state_dict"]
    for name, tensor in choose(loaded, "ema")[0].items():
        np.testing.assert_array_equal(tensor.numpy(), _arrays(seed=5)[name])


def test_tensors_that_an_average_lacks_come_from_the_weights(tmp_path: Path) -> None:
    average = {name: tensor for name, tensor in state(seed=5).items() if name != "down.bias"}
    weights, _, notes = choose(_load(written(tmp_path / "m.ckpt", state(), ema=average)), "ema")
    assert notes == ["not averaged, so taken from the state_dict: down.bias"]
    np.testing.assert_array_equal(weights["down.bias"], _arrays()["down.bias"])
    np.testing.assert_array_equal(weights["up.bias"], _arrays(seed=5)["up.bias"])


def test_an_average_under_other_names_is_not_completed_with_trained_weights(tmp_path: Path) -> None:
    loaded = _load(written(tmp_path / "m.ckpt", state(), ema=state("shadow.", seed=5)))
    assert choose(loaded, "ema")[0].keys() == state("shadow.").keys()


# --- finding the model's weights among others by their prefix, and when the user must --------------------


def _named(prefix: str = "", seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    return {name: tensor.numpy() for name, tensor in state(prefix, seed=seed).items()}


@pytest.mark.parametrize(("weights", "seed"), [(None, 1), ("model", 1), ("ema", 2), ("ema_model", 2), ("model.", 1)])
def test_an_average_beside_the_model_is_chosen_by_its_prefix(weights: str | None, seed: int) -> None:
    tensors = _named("model.", seed=1) | _named("ema_model.", seed=2) | {"loss.weight": np.ones(3, np.float32)}
    module = Mlp()
    notes = fit_behind_prefix(module, tensors, weights)
    assert torch.equal(module.up.weight, seeded(Mlp(), seed).get_parameter("up.weight"))
    other = "ema_model." if seed == 1 else "model."
    assert f"the checkpoint also has weights of this model under {other!r}; --weights PREFIX takes those" in notes
    assert "tensors that the model does not use, stored only for restore: loss.weight" in notes


def test_between_a_teacher_and_a_student_the_user_must_choose() -> None:
    tensors = _named("student.", seed=1) | _named("teacher.", seed=2)
    with pytest.raises(
        UsageError, match=r"under several prefixes, 'student.', 'teacher.'; choose one, such as --weights student"
    ):
        fit_behind_prefix(Mlp(), tensors)
    module = Mlp()
    fit_behind_prefix(module, tensors, "teacher")
    assert torch.equal(module.up.weight, seeded(Mlp(), 2).get_parameter("up.weight"))


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "_orig_mod.", "model._orig_mod.", "module.model.net."])
def test_prefixes_of_wrappers_are_ignored(prefix: str) -> None:
    module = Mlp()
    fit_behind_prefix(module, _named(prefix))
    assert torch.equal(module.up.weight, seeded(Mlp()).get_parameter("up.weight"))


def test_the_prefix_of_a_compiled_submodule_is_ignored() -> None:
    module = nn.ModuleDict({"net": Mlp()})
    fit_behind_prefix(module, _named("net._orig_mod."))
    assert torch.equal(module["net"].get_parameter("up.weight"), seeded(Mlp()).get_parameter("up.weight"))


def test_an_error_describes_the_prefix_that_fits_best() -> None:
    tensors = _named("model.") | {"loss.weight": np.ones(3, np.float32), "model.up.bias": np.ones(3, np.float32)}
    with pytest.raises(SourceError) as refused:
        fit_behind_prefix(Mlp(), tensors)
    assert str(refused.value).splitlines()[1:] == ["  shape: up.bias is [3] in the checkpoint, [64] in the model"]


# --- a checkpoint's hyper-parameters become arguments of a factory, as far as its sig --------------------


def takes_two(width: int, depth: int = 1) -> None: ...
def takes_all(width: int, **others: Any) -> None: ...
def takes_one_mapping(config: dict[str, Any], depth: int = 1) -> None: ...
def takes_by_position(width: int, /) -> None: ...


FOUND = {"width": 8, "rate": 0.1}
_GIVEN = "hyper-parameters of the file passed to --model"
_OVERRULED = "--model-args in place of the file's hyper-parameters"
_LEFT = "hyper-parameters of the file that --model does not take"


@pytest.mark.parametrize(
    ("factory", "explicit", "argument", "given", "notes"),
    [
        (takes_two, {}, "", {"width": 8}, [f"{_GIVEN}: width=8", f"{_LEFT}: rate"]),
        (takes_two, {"width": 9}, "", {"width": 9}, [f"{_OVERRULED}: width", f"{_LEFT}: rate"]),
        (takes_two, {"depth": 2}, "kwargs", {"width": 8, "depth": 2}, [f"{_GIVEN}: width=8", f"{_LEFT}: rate"]),
        (takes_all, {}, "", FOUND, [f"{_GIVEN}: width=8, rate=0.1"]),
        (takes_one_mapping, {}, "config", {"config": FOUND}, [f"{_GIVEN}: config={FOUND}"]),
        (takes_one_mapping, {"config": {}}, "config", {"config": {}}, [f"{_OVERRULED}: config"]),
        (takes_by_position, {}, "", {}, [f"{_LEFT}: width, rate"]),
    ],
)
def test_the_factory_gets_the_arguments_that_its_signature_takes(
    factory: Any, explicit: dict[str, Any], argument: str, given: dict[str, Any], notes: list[str]
) -> None:
    older = {"hparams": {"width": 0, "rate": 0.2, "_class_path": "a.B", 3: 4}}
    loaded = older | {"hparams_name": argument, "hyper_parameters": FOUND}
    assert factory_arguments(factory, explicit, loaded) == (given, notes)
