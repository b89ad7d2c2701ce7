"""Sources without an ONNX graph: the torch program alone is written, verified and restored, or rejected."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import seeded
from converting import Cli, tree
from restored import assert_restored
from scriptedmodels import Counted, Deciding, Encoder, Reflected, Stepwise, save
from torch import nn

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.read import scripted, torch_file
from bf16kit.runtime.loading import load

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")  # torch.jit raises it itself

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
_INPUT = ("--input", "x:float32:batch,16", "--trust-code")


class Unsteady(nn.Module):
    """A module that gives different outputs each time, and branches on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x + torch.rand_like(x))
        if bool(x.sum() > 0):
            result = -result
        return result


def _weights_doubled(artifact: Path) -> list[str]:
    """Return the names of the tensors that are stored unchanged in residual.bin."""
    return [entry.name for entry in Artifact.open(artifact).manifest.tensors if entry.file == "residual.bin"]


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--format", "torchscript")])
def test_a_module_that_branches_on_values_is_written_only_as_torchscript(
    cli: Cli, tmp_path: Path, target: Path, flags: tuple[str, ...]
) -> None:
    path = save(tmp_path / "m.pt", Deciding(), X[:2])
    said = cli("checkpoint", path, *_INPUT, "--out", target, *flags).published().out
    assert "note: no ONNX: prim::If depends on values in a tensor" in " ".join(said.split())
    artifact = Artifact.open(target)
    assert set(artifact.manifest.profiles) == {"torchscript"}
    assert artifact.manifest.reference is None
    assert artifact.manifest.oracle is not None
    assert artifact.manifest.oracle.checked
    runtime = load(artifact, "torchscript")
    for x in (X.abs(), -X.abs()):
        with torch.no_grad():
            expected = seeded(Deciding())(x).numpy()
        answered = runtime.run({"x": x.numpy()})["output"]
        assert 0 < np.linalg.norm(answered - expected) / np.linalg.norm(expected) < 1.5e-2
    assert artifact.manifest.batch_axis is None  # one sample could change the branch that the others take
    assert artifact.manifest.outputs[0].shape == ["batch", 16]


@pytest.mark.long
def test_the_checkpoint_is_restored_from_the_torchscript_module_and_its_residual(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    path = save(tmp_path / "m.pt", Deciding(), X[:2])
    cli("checkpoint", path, *_INPUT, "--out", target).published()
    assert _weights_doubled(target) == []
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    arrays = torch_file.to_numpy(path, scripted.tensors(scripted.load(path)))
    assert_restored(tmp_path / "fp32.safetensors", arrays)
    cli("verify", target).published()
    cli("verify", target, "--samples", "feeders:three").refused(2, "no fp32 reference", "no ONNX graph could be made")
    cli("inspect", target).published()
    cli("explain", target).refused(2, "no ONNX graph could be made of its source")


@pytest.mark.long
def test_a_fused_transformer_layer_keeps_its_batch_axis_and_stores_bf16_matrices(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    """torch traces a transformer layer as one operator that ONNX lacks. Its matrices are bf16, its arithmetic fp32."""
    ids = torch.arange(21).reshape(3, 7)
    with torch.no_grad():  # as for a model that will be served
        path = save(tmp_path / "m.pt", Encoder().eval(), ids[:2], "traced")
        expected = torch.jit.load(str(path))(ids).numpy()  # type: ignore[no-untyped-call]  # torch's own
    said = cli("checkpoint", path, "--input", "ids:int64:batch,seq", "--trust-code", "--out", target).published().out
    assert "_transformer_encoder_layer_fwd" in said
    artifact = Artifact.open(target)
    assert set(artifact.manifest.profiles) == {"torchscript"}
    assert artifact.manifest.batch_axis == 0
    narrow = {entry.name for entry in artifact.manifest.tensors if entry.dtype == "bfloat16"}
    assert {name for name in narrow if "layer" in name} >= {"layer.linear1.weight", "layer.self_attn.in_proj_weight"}
    answered = load(artifact, "torchscript").run({"ids": ids.numpy()})["output"]
    assert 0 < np.linalg.norm(answered - expected) / np.linalg.norm(expected) < 1.5e-2


@pytest.mark.long
def test_a_torch_module_that_onnx_cannot_express_is_written_only_as_a_trace(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    torch.save(seeded(Reflected()).state_dict(), tmp_path / "m.pt")
    given = ("--model", "scriptedmodels:Reflected", *_INPUT)
    said = cli("checkpoint", tmp_path / "m.pt", *given, "--out", target).published().out
    assert "householder" in said
    with torch.no_grad():
        expected = seeded(Reflected())(X).numpy()
    answered = load(Artifact.open(target), "torchscript").run({"x": X.numpy()})["output"]
    assert 0 < np.linalg.norm(answered - expected) / np.linalg.norm(expected) < 1.5e-2


def test_a_torch_module_that_branches_is_rejected_with_the_advice_to_script_it(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    """A trace would keep only one of the two branches, for all later inputs."""
    torch.save(seeded(Deciding()).state_dict(), tmp_path / "m.pt")
    given = ("--model", "scriptedmodels:Deciding", *_INPUT)
    cli("checkpoint", tmp_path / "m.pt", *given, "--out", target).refused(3, "no ONNX: ", "torch.jit.script(module)")
    assert tree(tmp_path) == ["m.pt"]


@pytest.mark.long
def test_a_trace_that_does_not_run_is_rejected_with_both_reasons(cli: Cli, tmp_path: Path, target: Path) -> None:
    """Its file holds the weights, so nothing is left to publish."""
    torch.save(seeded(Stepwise()).state_dict(), tmp_path / "m.pt")
    given = ("--model", "scriptedmodels:Stepwise", "--input", "x:float32:batch,seq,16")
    cli("checkpoint", tmp_path / "m.pt", *given, "--out", target).refused(
        3,
        "no ONNX: ",
        "fixes dimension 1 of x[batch,seq,16] at the example's size",
        "the TorchScript does not run on the samples: ",
    )
    assert tree(tmp_path) == ["m.pt"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--format", "onnx"), 3, "no ONNX graph can be made of it: prim::If depends on values"),
        (("--format", "onnx", "--format", "torchscript"), 3, "no ONNX graph can be made of it"),
        (("--format", "safetensors"), 3, "by running it as an ONNX graph, and no ONNX graph can be made: prim::If"),
        (("--subnormals", "flush"), 2, "--subnormals flush: is for ONNX"),
        (("--saturate",), 2, "--saturate: is for ONNX"),
        (("--budget", "relative_l2=1e-6"), 1, "there is no ONNX graph that it could mend"),
        (("--format", "pt2"), 3, "no torch.export program"),
    ],
)  # fmt: skip
def test_options_that_need_an_onnx_graph_are_rejected_with_the_reason(
    cli: Cli, tmp_path: Path, target: Path, flags: tuple[str, ...], code: int, said: str
) -> None:
    path = save(tmp_path / "m.pt", Deciding(), X[:2])
    cli("checkpoint", path, *_INPUT, "--out", target, *flags).refused(code, said)
    assert tree(tmp_path) == ["m.pt"]


def test_a_module_with_random_outputs_is_rejected(cli: Cli, tmp_path: Path, target: Path) -> None:
    path = save(tmp_path / "m.pt", Unsteady(), X[:2])
    cli("checkpoint", path, *_INPUT, "--out", target).refused(
        3, "prim::If", "cannot be checked", "different outputs for the same input"
    )
    assert tree(tmp_path) == ["m.pt"]


@pytest.mark.long
def test_random_samples_that_the_module_rejects_are_an_error_with_the_remedy(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    """Random counts are 0 or 1; the example, whose counts are 1, does run."""
    path = save(tmp_path / "m.pt", Counted(), None)
    cli("checkpoint", path, *_INPUT, "--input", "count:int64:batch", "--out", target).refused(
        3, "nothing to count", "pass others with --samples FILE, made by numpy.savez('sample.npz', x=…, count=…)"
    )


def test_a_weight_that_bf16_cannot_hold_is_named(cli: Cli, tmp_path: Path, target: Path) -> None:
    module = seeded(Deciding())
    with torch.no_grad():
        module.get_parameter("layer.weight")[0, 0] = 3.4e38
    made: Any = torch.jit.script(module)
    torch.jit.save(made, tmp_path / "m.pt")
    cli("checkpoint", tmp_path / "m.pt", *_INPUT, "--out", target).refused(
        3, "'layer.weight': 1 of 256 values overflow"
    )
    assert tree(tmp_path) == ["m.pt"]
