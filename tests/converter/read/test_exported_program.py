"""torch.export programs as sources: commands, their results, and files that are rejected before torch reads them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exportedfiles as files
import numpy as np
import pytest
import torch
from architectures import Cnn, Mlp, Tied, seeded
from converting import ONNX_ONLY, Cli, tree
from safetensors.numpy import load_file

from bf16kit.artifact.artifact import Artifact
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.loading import load, load_reference
from converter.read.exported_program import read_file


def written(directory: Path, module: torch.nn.Module, *example: Any, **named: Any) -> Path:
    path = directory / "m.pt2"
    path.write_bytes(files.exported(module, *example, **named))
    return path


@pytest.mark.long
def test_a_program_is_converted_and_restored_and_gives_the_outputs_of_torch(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    module = seeded(Cnn()).eval()
    source = written(tmp_path, module, torch.ones(2, 3, 16, 16))
    cli("checkpoint", source, "--out", target).published()
    artifact = Artifact.open(target)
    assert set(artifact.manifest.profiles) == {"cpu", "cuda"}
    assert artifact.manifest.source.format == "torch-export"
    assert artifact.manifest.inputs[0].spec() == TensorSpec("x", "float32", ("batch", 3, 16, 16))
    assert artifact.manifest.oracle is not None
    assert artifact.manifest.oracle.checked
    x = np.random.default_rng(1).standard_normal((3, 3, 16, 16), np.float32)
    with torch.inference_mode():
        expected = module(torch.from_numpy(x)).numpy()
    (answer,) = load_reference(artifact).run({"x": x}).values()
    assert np.allclose(answer, expected, rtol=1e-5, atol=1e-5)
    (rounded,) = load(artifact, "cpu").run({"x": x}).values()
    assert np.linalg.norm(rounded - expected) / np.linalg.norm(expected) < 1e-2

    cli("restore", target, "--out", tmp_path / "back.safetensors").published()
    back = load_file(tmp_path / "back.safetensors")
    for name, tensor in module.state_dict().items():
        assert back[name].tobytes() == tensor.numpy().tobytes(), name


def test_names_and_free_dimensions_are_the_programs_own(tmp_path: Path) -> None:
    class Both(torch.nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"kept": ids * mask * scale}

    path = tmp_path / "m.pt2"
    example = (torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64), torch.ones(1))
    free = {0: torch.export.Dim("rows", max=64), 1: torch.export.Dim("tokens")}
    torch.export.save(torch.export.export(Both(), example, dynamic_shapes=(free, free, None)), path)
    found = read_file(path, trust_pickle=False)
    assert found.inputs() == (
        TensorSpec("ids", "int64", ("batch", "ids_1")),
        TensorSpec("mask", "int64", ("batch", "ids_1")),
        TensorSpec("scale", "float32", (1,)),
    )
    assert found.program.outputs == ("kept",)
    assert "exported for sizes up to 64 in dimension 0 of ids" in found.notes[0]


def test_dimensions_may_be_named_and_fixed_with_input(cli: Cli, tmp_path: Path, target: Path) -> None:
    source = written(tmp_path, seeded(Mlp()), torch.ones(2, 16))
    cli("checkpoint", source, "--out", target, "--input", "x:float32:rows,16", *ONNX_ONLY).published()
    assert Artifact.open(target).manifest.inputs[0].shape == ["rows", 16]
    for wrong in ("x:float32:rows,17", "x:int64:rows,16", "y:float32:rows,16"):
        other = target.with_name("2")
        cli("checkpoint", source, "--out", other, "--input", wrong, *ONNX_ONLY).refused(2, "--input ")


def test_tied_weights_keep_both_names(cli: Cli, tmp_path: Path, target: Path) -> None:
    source = written(tmp_path, seeded(Tied()), torch.zeros(2, 3, dtype=torch.int64))
    cli("checkpoint", source, "--out", target, *ONNX_ONLY).published()
    names = [entry.name for entry in Artifact.open(target).manifest.checkpoint]
    assert {"table.weight", "out.weight"} <= set(names)


def test_a_bf16_program_is_converted_with_its_weights_in_bf16(cli: Cli, tmp_path: Path, target: Path) -> None:
    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = seeded(Mlp()).to(torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.core(x.to(torch.bfloat16)).float()
            return found

    source = written(tmp_path, Half(), torch.ones(2, 16))
    cli("checkpoint", source, "--out", target, *ONNX_ONLY).published()
    assert {entry.dtype for entry in Artifact.open(target).manifest.checkpoint} == {"bfloat16"}


class Canary:
    """Creates the file ``executed`` in the working directory when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


def opaque(archive: bytes) -> bytes:
    """Name a pickle in the table of constants; torch.export.load would unpickle it."""
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    found = files.changed(archive, files.CONSTANTS, lambda table: table["config"].update(extra=entry))
    return files.with_records(found, **{"data/constants/opaque_obj_0": pickle.dumps(Canary())})


def pickled(archive: bytes, value: object) -> bytes:
    """Replace the first weight with ``value``, pickled."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    found = files.changed(archive, files.WEIGHTS, lambda table: table["config"]["up.weight"].update(use_pickle=True))
    return files.with_records(found, **{"data/weights/weight_0": buffer.getvalue()})


def operator(archive: bytes) -> bytes:
    given = [{"name": "", "arg": {"as_string": "touch executed"}, "kind": 1}]
    call = {"target": "torch.os.system", "inputs": given}
    return files.changed(archive, files.MODEL, lambda program: files.node(program).update(call))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (opaque, "constant 'extra' is an object, not a tensor (opaque_obj_0)"),
        (lambda archive: pickled(archive, Canary()), "weight 'up.weight' is a pickle, which can run any code"),
        (operator, "uses the operator 'torch.os.system'"),
        (lambda archive: archive.replace(b"PK\x03\x04", b"PK\x03\x05"), "is not a known checkpoint format"),
    ],
)
def test_a_file_that_would_run_code_is_rejected_and_runs_nothing(
    cli: Cli,
    tmp_path: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[bytes], bytes],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    archive = files.exported(seeded(Mlp()), torch.ones(2, 16))
    (tmp_path / "m.pt2").write_bytes(change(archive))
    cli("checkpoint", "m.pt2", "--out", target).refused(2, "m.pt2: ", said)
    assert tree(tmp_path) == ["m.pt2"]


def test_a_pickled_weight_is_read_only_with_trust_pickle(cli: Cli, tmp_path: Path, target: Path) -> None:
    weight = seeded(Mlp()).state_dict()["up.weight"]
    source = tmp_path / "m.pt2"
    source.write_bytes(pickled(files.exported(seeded(Mlp()), torch.ones(2, 16)), weight * 2))
    cli("checkpoint", source, "--out", target, *ONNX_ONLY).refused(2, "--trust-pickle reads it")
    cli("checkpoint", source, "--out", target, "--trust-pickle", *ONNX_ONLY).published()
    assert np.array_equal(Artifact.open(target).restore("up.weight"), (weight * 2).numpy())


def test_a_pickle_without_a_tensor_is_rejected_even_with_trust_pickle(cli: Cli, tmp_path: Path, target: Path) -> None:
    source = tmp_path / "m.pt2"
    source.write_bytes(pickled(files.exported(seeded(Mlp()), torch.ones(2, 16)), {"a": 1}))
    cli("checkpoint", source, "--out", target, "--trust-pickle").refused(
        2, "is a pickle that does not hold a plain tensor"
    )


def test_a_program_that_changes_its_state_is_rejected(cli: Cli, tmp_path: Path, target: Path) -> None:
    class Counting(torch.nn.Module):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x + self.count

    source = written(tmp_path, Counting(), torch.ones(2, 16))
    cli("checkpoint", source, "--out", target).refused(2, "m.pt2: ")


def test_the_option_model_is_rejected(cli: Cli, tmp_path: Path, target: Path) -> None:
    source = written(tmp_path, seeded(Mlp()), torch.ones(2, 16))
    said = "--model: a torch.export program brings its own architecture"
    cli("checkpoint", source, "--out", target, "--model", "architectures:Mlp").refused(2, said)
