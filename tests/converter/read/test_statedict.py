"""Bare state dicts: the architecture is built, the weights are fitted into it, all tensors are restored exactly."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from architectures import Cnn, Mlp, Tied, Widening, Windows, save, seeded
from converting import Cli, tree
from peaks import measured_alone
from restored import assert_restored
from safetensors.torch import save_file
from torch import nn

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.read.statedict import fit
from bf16kit.messages.errors import SourceError, UsageError
from bf16kit.numerics.rounding import BF16
from bf16kit.runtime.loading import load, load_reference


def _arrays(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in seeded(module).state_dict().items()}


@pytest.mark.long
def test_a_convolutional_model_is_restored_bit_for_bit(cli: Cli, tmp_path: Path, target: Path) -> None:
    """BatchNorm is folded into the stored weights. The int64 counters of batches are not in any graph."""
    path = save(tmp_path / "cnn.pt", Cnn())
    arguments = ("--model", "architectures:Cnn", "--input", "x:float32:batch,3,16,16")
    cli("checkpoint", path, *arguments, "--out", target).published()
    artifact = Artifact.open(target)
    assert artifact.manifest.batch_axis == 0
    assert set(artifact.manifest.profiles) == {"cpu", "cuda"}  # no product rounds: no cpu-bf16
    assert [entry.name for entry in artifact.manifest.tensors if entry.scale] != []
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert_restored(tmp_path / "fp32.safetensors", _arrays(Cnn()))

    x = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = seeded(Cnn())(x).numpy()
    np.testing.assert_allclose(load_reference(artifact).run({"x": x.numpy()})["output"], expected, atol=1e-4)
    np.testing.assert_allclose(load(artifact, "cpu").run({"x": x.numpy()})["output"], expected, atol=0.05)


@pytest.mark.long
def test_a_tied_weight_saved_once_fills_both_names(cli: Cli, tmp_path: Path, target: Path) -> None:
    """safetensors' writers do this, because they refuse to write shared memory twice."""
    state = {k: v.clone() for k, v in seeded(Tied()).state_dict().items() if k != "out.weight"}
    save_file(state, tmp_path / "tied.safetensors")
    arguments = ("--model", "architectures:Tied", "--input", "ids:int64:batch,seq", "--format", "onnx")
    cli("checkpoint", tmp_path / "tied.safetensors", *arguments, "--out", target).published()
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert_restored(tmp_path / "fp32.safetensors", {k: v.numpy() for k, v in state.items()})


def _named(prefix: str = "", seed: int = 0) -> dict[str, np.ndarray]:
    return {f"{prefix}{name}": tensor.numpy() for name, tensor in seeded(Mlp(), seed).state_dict().items()}


def _holds(module: Mlp, seed: int = 0) -> bool:
    return torch.equal(module.up.weight, seeded(Mlp(), seed).get_parameter("up.weight"))


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "_orig_mod.", "module._orig_mod.", "module.model.net."])
def test_the_prefixes_of_wrappers_are_ignored(prefix: str) -> None:
    fit(module := Mlp(), _named(prefix))
    assert _holds(module)
    fit(nn.ModuleDict({"net": (inner := Mlp())}), _named("net._orig_mod."))  # a compiled submodule
    assert _holds(inner)


def test_between_modules_that_all_fit_the_user_must_choose() -> None:
    tensors = _named("model.", seed=1) | _named("ema_model.", seed=2) | {"loss.weight": np.ones(3, np.float32)}
    with pytest.raises(UsageError, match=r"under several prefixes, 'model.', 'ema_model.'; choose .* --weights model"):
        fit(Mlp(), tensors)
    for wanted, seed, other in (("model.", 1, "ema_model."), ("ema_model", 2, "model.")):
        notes = fit(module := Mlp(), tensors, wanted)
        assert _holds(module, seed)
        assert f"the checkpoint also has weights of this model under {other!r}; --weights PREFIX takes those" in notes
        assert "tensors that the model does not use, stored only for restore: loss.weight" in notes
    with pytest.raises(UsageError, match=r"--weights net: no tensor of the model has the prefix 'net.'; found: 'mo"):
        fit(Mlp(), tensors, "net")


def test_weights_are_fitted_in_the_models_own_dtypes() -> None:
    state = {name: array.astype(ml_dtypes.bfloat16) for name, array in _arrays(Mlp()).items()}
    fit(module := Mlp(), state)
    assert module.up.weight.dtype is torch.float32
    assert module.up.weight.detach().numpy().tolist() == state["up.weight"].astype(np.float32).tolist()


def test_the_first_five_mismatches_are_named_and_the_rest_counted() -> None:
    state = {f"layer.{i}": np.ones(i, np.float32) for i in range(4)} | {"up.weight": np.ones((3, 3), np.float32)}
    with pytest.raises(SourceError) as refused:
        fit(Mlp(), state)
    assert str(refused.value).splitlines() == [
        "the checkpoint does not fit the model:",
        "  shape: up.weight is [3, 3] in the checkpoint, [64, 16] in the model",
        "  missing: up.bias [64]",
        "  missing: down.weight [10, 64]",
        "  missing: down.bias [10]",
        "  unexpected: layer.0 [0]",
        "  and 3 more",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "holds weights but no architecture; name it with --model pkg.mod:factory"),
        (["--model", "architectures"], "--model 'architectures': expected pkg.mod:name, for example"),
        (["--model", "architectures.py:Mlp"], "expected pkg.mod:name, not a path: write architectures:Mlp\n"),
        (["--model", "./models/zoo.py"], "expected pkg.mod:name, not a path: write models.zoo:NAME\n"),
        (["--model", "../zoo.py:Mlp"], "write zoo:Mlp, with PYTHONPATH=.. in the environment\n"),
        (["--model", "architectures:Mlpp"], "module architectures has no 'Mlpp' (did you mean Mlp?)"),
        (["--model", "no_such_module:Mlp"], "named 'no_such_module'; run in the directory that holds it, or"),
        (["--model", "architectures:failing"], "the factory failed: RuntimeError: no such preset"),
        (["--model", "architectures:not_a_module"], "returned str, expected a torch.nn.Module"),
        (["--model", "architectures:Mlp", "--model-args", '{"depth": 3}'], "unexpected keyword argument 'depth'"),
        (["--model", "architectures:Cnn"], "does not fit the model:\n  missing: features.0.weight [16, 3, 3, 3]"),
        (["--model", "architectures:Mlp", "--input", "y:float32:batch,16"], "--input y: Mlp takes x\n"),
        (["--model", "architectures:Mlp"], "--input NAME:DTYPE:DIMS, for example --input x:float32:batch,16"),
    ],
)
def test_an_architecture_that_is_missing_or_wrong_is_rejected(
    cli: Cli, tmp_path: Path, target: Path, mlp_file: Path, arguments: list[str], said: str
) -> None:
    cli("checkpoint", mlp_file, "--out", target, *arguments).refused(2, said)
    assert tree(tmp_path) == []


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        ("Mlp", "x:float32:batch,17", "the model failed on an example input (x[2, 17]): RuntimeError: mat1 and mat2"),
        ("Mlp", "x:float32:99999999999999,16", "an example input cannot be made (x[99999999999999,16])"),
        ("Mlp", "x:int64:batch,16", "the model failed on an example input"),
        ("Mlp", "x:float32:batch,wide", "or values, give --samples: one of them is then the example"),
        ("Mlp", "x:float64:batch,16", "converted in fp32: give x as float32, unless the module casts it itself"),
        ("Untraceable", "x:float32:batch,16", "architectures.py, line "),
    ],
)
def test_a_model_that_cannot_be_run_or_exported_is_rejected(
    cli: Cli, tmp_path: Path, target: Path, mlp_file: Path, model: str, given: str, said: str
) -> None:
    inputs = ("--input", *given.split())
    cli("checkpoint", mlp_file, "--model", f"architectures:{model}", *inputs, "--out", target).refused(3, said)
    assert tree(tmp_path) == []


@pytest.mark.long
def test_a_model_that_runs_on_none_of_the_plain_examples_is_exported_from_a_sample(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    """The file has one row, and an array of expected outputs, which is no input."""
    path, module = save(tmp_path / "windows.pt", Windows()), seeded(Windows())
    arguments = ("checkpoint", path, "--model", "architectures:Windows", "--input", "x:float32:batch,1,time")
    cli(*arguments, "--out", target).refused(3, "failed on an example input (x[2, 1, 7])")
    x = torch.randn(1, 1, 720, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        np.savez(tmp_path / "samples.npz", x=x.numpy(), output=module(x).numpy())
        cli(*arguments, "--samples", tmp_path / "samples.npz", "--out", target).published()
        longer = torch.randn(3, 1, 901, generator=torch.Generator().manual_seed(2))
        expected = module(longer).numpy()
    reference = load_reference(Artifact.open(target))
    np.testing.assert_allclose(reference.run({"x": longer.numpy()})["output"], expected, atol=1e-5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch.jit's own
@pytest.mark.parametrize("scripted", [False, True])
def test_a_module_that_takes_bf16_is_converted_and_checked_against_itself(
    scripted: bool, cli: Cli, tmp_path: Path, target: Path
) -> None:
    path, arguments = save(tmp_path / "m.pt", Widening()), ["--model", "architectures:Widening"]
    if scripted:
        torch.jit.script(seeded(Widening())).save(path)  # type: ignore[no-untyped-call]
        arguments = ["--trust-code"]
    done = cli("checkpoint", path, *arguments, "--input", "x:bfloat16:batch,16", "--out", target).published()
    assert "was not checked against the source" not in done.out
    assert Artifact.open(target).golden().inputs["x"].dtype == BF16


@pytest.mark.long
def test_a_trusted_whole_module_needs_no_architecture(cli: Cli, tmp_path: Path, target: Path) -> None:
    torch.save(seeded(Mlp()), tmp_path / "whole.pt")
    arguments = ("--input", "x:float32:batch,16", "--trust-code", "--format", "onnx")
    cli("checkpoint", tmp_path / "whole.pt", *arguments, "--out", target).published()
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert_restored(tmp_path / "fp32.safetensors", _arrays(Mlp()))


BUILD = """
import sys
from pathlib import Path
import numpy as np
from bf16kit.converter.options import Options, parse_target
from bf16kit.converter.process.memory import map_large_blocks
from bf16kit.converter.read.statedict import build, fit
from peaks import anonymous, peak_anonymous
map_large_blocks()
def built(width):
    arguments = {"in_features": width, "out_features": width, "dtype": getattr(__import__("torch"), sys.argv[2])}
    target = parse_target(Path(sys.argv[1]) / "m" / "1")
    target.path.parent.mkdir(exist_ok=True)
    tensors = {"weight": np.zeros((width, width), np.float32), "bias": np.zeros(width, np.float32)}
    before = anonymous()
    with peak_anonymous() as peak:
        module = build(Options(source=target.path, target=target, model="torch.nn:Linear", model_args=arguments))
        fit(module, tensors)
    return peak.bytes - before
built(64)  # its libraries are in memory from here on
print(built(4096), 4 * 4096 * 4096)
"""


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_module_that_a_factory_builds_is_not_held_in_memory(tmp_path: Path, dtype: str) -> None:
    """The module has 67 MB in fp32. Each tensor of an fp64 module is narrowed in memory and then moved to a file."""
    peak, size = map(int, measured_alone(BUILD, str(tmp_path), dtype).split())
    assert peak / size < (0.2 if dtype == "float32" else 1.2), f"{peak / size:.2f} times the weights"
    assert list((tmp_path / "m").iterdir()) == []
