"""torch.export programs as sources: commands, their results, and files that are rejected."""

from pathlib import Path
from typing import Any

import exportedfiles as files
import pytest
import torch
from architectures import Cnn, Counting, Mlp, Tied, seeded
from converting import ONNX_ONLY, Cli, process
from restored import assert_restored
from torch import nn

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.read.exportedprogram import ProgramModule, program_inputs
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.torchruntimes import load_program

TRUSTED = "--trust-code"


def written(directory: Path, module: torch.nn.Module, *example: Any, **named: Any) -> Path:
    path = directory / "m.pt2"
    path.write_bytes(files.exported(module, *example, **named))
    return path


@pytest.mark.long
def test_a_program_is_converted_and_restored(cli: Cli, tmp_path: Path, target: Path) -> None:
    module = seeded(Cnn()).eval()
    source = written(tmp_path, module, torch.ones(2, 3, 16, 16))
    cli("checkpoint", source, "--out", target, TRUSTED).published()
    artifact = Artifact.open(target)
    assert set(artifact.manifest.profiles) == {"cpu", "cuda"}
    assert artifact.manifest.source.format == "torch-export"
    assert artifact.manifest.inputs[0].spec() == TensorSpec("x", "float32", ("batch", 3, 16, 16))
    cli("restore", target, "--out", tmp_path / "back.safetensors").published()
    state = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    assert_restored(tmp_path / "back.safetensors", state)


@pytest.mark.long
def test_dimensions_may_be_named_and_fixed_with_input(cli: Cli, tmp_path: Path, target: Path) -> None:
    source = written(tmp_path, seeded(Mlp()), torch.ones(2, 16))
    command = ("checkpoint", source, TRUSTED, *ONNX_ONLY, "--out", target, "--input")
    for wrong in ("x:float32:rows,17", "x:int64:rows,16", "y:float32:rows,16"):
        cli(*command, wrong).refused(2, "--input ")
    cli(*command, "x:float32:rows,16").published()
    assert Artifact.open(target).manifest.inputs[0].shape == ["rows", 16]


@pytest.mark.long
def test_a_bf16_program_is_converted_with_its_weights_in_bf16_and_tied_ones_under_both_names(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = seeded(Tied()).to(torch.bfloat16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.core(ids).float()
            return found

    source = written(tmp_path, Half(), torch.zeros(2, 3, dtype=torch.int64))
    cli("checkpoint", source, "--out", target, TRUSTED, *ONNX_ONLY).published()
    found = Artifact.open(target).manifest.checkpoint
    assert {entry.dtype for entry in found} == {"bfloat16"}
    assert {"core.table.weight", "core.out.weight"} <= {entry.name for entry in found}


def test_a_program_is_not_loaded_unless_its_author_is_trusted(cli: Cli, tmp_path: Path, target: Path) -> None:
    source = written(tmp_path, seeded(Mlp()), torch.ones(2, 16))
    said = ("m.pt2: is a torch.export program", "whoever writes it decides what runs", "pass --trust-code if you trust")
    cli("checkpoint", source, "--out", target, *ONNX_ONLY).refused(2, *said)


def test_damage_is_noticed(cli: Cli, tmp_path: Path, target: Path) -> None:
    whole = files.exported(seeded(Mlp()), torch.ones(2, 16))
    weight = files.records(whole)["data/weights/weight_0"]
    damaged = (
        (whole[: int(len(whole) * 0.7)], ""),
        (whole.replace(weight, b"\x01" + weight[1:]), "damaged: its record "),
    )
    for data, said in damaged:
        (tmp_path / "m.pt2").write_bytes(data)
        cli("checkpoint", tmp_path / "m.pt2", "--out", target, TRUSTED).refused(2, f"m.pt2: {said}")


def test_a_program_of_another_torch_is_rejected_with_the_reason(cli: Cli, tmp_path: Path, target: Path) -> None:
    def rename(program: Any) -> None:
        files.node(program)["target"] = "torch.ops.aten.of_tomorrow.default"

    whole = files.changed(files.exported(seeded(Mlp()), torch.ones(2, 16)), files.MODEL, rename)
    (tmp_path / "m.pt2").write_bytes(whole)
    cli("checkpoint", tmp_path / "m.pt2", "--out", target, TRUSTED).refused(
        2, "m.pt2: torch.export cannot load m.pt2: ", "of_tomorrow"
    )


def test_inputs_in_structures_by_keyword_and_constants_are_given_as_exported(tmp_path: Path) -> None:
    class Many(torch.nn.Module):
        def forward(self, x: torch.Tensor, *, pair: list[Any], flag: Any = None, scale: int = 2) -> torch.Tensor:
            return torch.as_tensor(x * scale + pair[0] - pair[1]["k"])

    named = {"pair": [torch.ones(2), {"k": torch.ones(2)}], "flag": None, "scale": 3}
    path = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(Many(), (torch.ones(2),), named), path)
    program = load_program(path)
    assert [spec.name for spec in program_inputs(path, program, ())] == ["x", "pair_0", "pair_1_k"]
    found = ProgramModule(program)(torch.full((2,), 5.0), torch.full((2,), 4.0), torch.full((2,), 1.0))
    assert found.tolist() == [18.0, 18.0]


@pytest.mark.long
def test_a_transformers_program_is_loaded_with_its_own_outputs(tmp_path: Path) -> None:
    """torch knows the class of its outputs only once transformers is imported: here in a process without it."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    ids = torch.zeros(2, 5, dtype=torch.int64)
    program = torch.export.export(transformers.BertModel(config).eval(), (), {"input_ids": ids}, strict=False)
    torch.export.save(program, tmp_path / "m.pt2")
    target = tmp_path / "m" / "1"
    process("checkpoint", tmp_path / "m.pt2", "--out", target, TRUSTED, *ONNX_ONLY).published()
    assert [entry.name for entry in Artifact.open(target).manifest.outputs] == ["last_hidden_state", "pooler_output"]


class Normed(torch.nn.Module):
    """Under autocast, its norm and its table would compute in bf16, or fail; torch asserts a dtype before the cast."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.line, self.norm = nn.Embedding(8, 16), nn.Linear(16, 16), nn.GroupNorm(4, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.line(self.table(ids)).float())
        return found


def test_norms_and_tables_are_fp32_under_autocast(tmp_path: Path) -> None:
    made = ProgramModule(load_program(written(tmp_path, seeded(Normed()), torch.zeros(2, dtype=torch.int64))))
    for name, parameter in made.named_parameters():
        if parameter.ndim > 1 or name.endswith("line.bias"):
            parameter.data = parameter.data.to(torch.bfloat16)
    ids = torch.arange(3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = made(ids)
    assert found.dtype is torch.float32
    with torch.no_grad():
        expected = seeded(Normed())(ids)
    assert (found - expected).norm() / expected.norm() < 1e-2


def test_a_program_that_changes_its_state_is_rejected(cli: Cli, tmp_path: Path, target: Path) -> None:
    source = written(tmp_path, Counting(), torch.ones(2, 16))
    cli("checkpoint", source, "--out", target, TRUSTED).refused(
        3, "m.pt2: running the program changed the model's own tensor"
    )
