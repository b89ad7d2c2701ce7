"""``bf16-convert restore``, and the size of artifacts of checkpoints in every precision."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
from architectures import Mlp, seeded
from converting import MLP, ONNX_ONLY, Cli, tree
from openfiles import files_of_at_most
from restored import Array, assert_restored
from safetensors import safe_open
from safetensors.numpy import save_file

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.numerics.tensors import BY_NAME


def test_the_checkpoint_is_restored_bit_for_bit(cli: Cli, mlp: Artifact, mlp_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "fp32.safetensors"
    done = cli("restore", mlp.path, "--out", out).published()
    assert done.out == f"restored 4 tensors, 7.0 kB, to {out}\n"
    state = torch.load(mlp_file, weights_only=True)
    assert_restored(out, {name: tensor.numpy() for name, tensor in state.items()})
    with safe_open(out, framework="numpy") as file:  # the safetensors library reads the file
        assert set(file.keys()) == set(state)
    assert [path.name for path in tmp_path.iterdir()] == ["fp32.safetensors"]


@pytest.mark.long
def test_tensors_of_every_dtype_are_restored(cli: Cli, tmp_path: Path, target: Path) -> None:
    random = np.random.default_rng(0)
    state: dict[str, Array] = {name: tensor.numpy() for name, tensor in seeded(Mlp()).state_dict().items()}
    extra: dict[str, Array] = {
        f"a_{name}": random.integers(0, 2, (3, 5)).astype(name)
        for name in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
    }
    extra |= {"a_float16": np.ones(3, np.float16), "a_float64": random.standard_normal(7), "a_empty": np.empty((0, 2))}
    extra |= {"a_bfloat16": np.ones(3, ml_dtypes.bfloat16), "a_scalar": np.array(1.5, np.float32)}
    save_file(state | extra, tmp_path / "m.safetensors")
    buffers = {name: (array.dtype.name, array.shape) for name, array in extra.items()}
    arguments = ("--model", "architectures:with_buffers", "--model-args", json.dumps({"buffers": buffers}))
    cli("checkpoint", tmp_path / "m.safetensors", "--out", target, *arguments, *MLP[2:], *ONNX_ONLY).published()
    cli("restore", target, "--out", tmp_path / "out").published()
    assert_restored(tmp_path / "out", state | extra)


def test_an_existing_file_is_replaced_only_with_force(cli: Cli, small: Artifact, tmp_path: Path) -> None:
    out = tmp_path / "fp32.safetensors"
    out.write_text("precious")
    cli("restore", small.path, "--out", out).refused(2, f"{out}: already exists", "--force")
    assert out.read_text() == "precious"
    cli("restore", small.path, "--out", out, "--force").published()
    assert_restored(out, graphs.weights_of(graphs.mlp()))


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_directory_is_never_replaced(cli: Cli, small: Artifact, tmp_path: Path, force: list[str]) -> None:
    (tmp_path / "out").mkdir()
    cli("restore", small.path, "--out", tmp_path / "out", *force).refused(2, "out: is a directory")
    assert tree(tmp_path) == ["out"]


def test_a_dangling_link_is_not_replaced(cli: Cli, small: Artifact, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "absent")
    cli("restore", small.path, "--out", tmp_path / "out").refused(2, "already exists")


def test_a_missing_directory_is_not_created(cli: Cli, small: Artifact, tmp_path: Path) -> None:
    cli("restore", small.path, "--out", tmp_path / "no" / "fp32").refused(2, f"{tmp_path / 'no'}: no such directory")


@pytest.mark.long
def test_without_a_residual_the_error_states_why_nothing_can_be_restored(
    cli: Cli, onnx_file: Path, tmp_path: Path, target: Path
) -> None:
    done = cli("checkpoint", onnx_file, "--out", target, "--no-residual", *ONNX_ONLY).published()
    assert "the checkpoint cannot be restored" in " ".join(done.out.split())
    assert not {"residual.bin", "reference.onnx", "report.html"} & {path.name for path in target.iterdir()}
    assert Artifact.open(target).manifest.drift["cpu"].outputs["y"]["relative_l2"]["mean"] > 0
    cli("restore", target, "--out", tmp_path / "out").refused(2, "keeps no residual", "without --no-residual")
    assert not (tmp_path / "out").exists()


def test_a_tensor_name_that_safetensors_reserves_is_rejected(cli: Cli, tmp_path: Path, target: Path) -> None:
    node = onnx.helper.make_node("MatMul", ["x", "__metadata__"], ["y"])
    edges = [graphs.edge("x", ["n", 16])], [graphs.edge("y", ["n", 16])]
    onnx.save(graphs.model([node], *edges, [graphs.initializer("__metadata__", graphs.values(16, 16))]), tmp_path / "m")
    done = cli("checkpoint", tmp_path / "m", "--out", target, *ONNX_ONLY)
    done.refused(2, "a tensor named '__metadata__', which safetensors reserves; rename the tensor")
    assert not target.parent.exists()


def test_a_full_disk_leaves_no_partial_file(cli: Cli, small: Artifact, tmp_path: Path) -> None:
    with files_of_at_most(1 << 10):
        done = cli("restore", small.path, "--out", tmp_path / "out")
    done.refused(2, f"{tmp_path / 'out'}: disk full")
    assert tree(tmp_path) == []


ARGUMENTS = ("--model", "architectures:Mlp", "--model-args", '{"width": 64, "hidden": 1024, "classes": 128}')
INPUT = ("--input", "x:float32:batch,64", "--format", "onnx", "--profile", "cpu", "--no-report")


def saved(path: Path, dtype: str, **changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """Save the state dict of a module of 0.8 MB in fp32 at ``dtype``, and return it."""
    state = seeded(Mlp(64, 1024, 128)).state_dict()
    state = {name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()} | changed
    safetensors.torch.save_file(state, path)
    return state


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "bound", "restored", "said"),
    [
        ("float32", 1.03, "float32", ""),
        ("bfloat16", 1.03, "bfloat16", ""),
        ("float16", 1.25, "float16", "4 of the checkpoint's tensors are fp16: bf16 has 8 of their 11 bits"),
        ("float64", 0.52, "float32", "4 of the checkpoint's tensors are fp64: the model computes in fp32"),
    ],
)
def test_the_size_of_an_artifact_and_the_checkpoint_restored_from_it(
    cli: Cli, tmp_path: Path, target: Path, dtype: str, bound: float, restored: str, said: str
) -> None:
    """An fp16 value takes 2 bytes as bf16 and 3 more bits, plus ties: 1.21 times its size at best."""
    state = saved(tmp_path / "model.safetensors", dtype)
    done = cli("checkpoint", tmp_path / "model.safetensors", "--out", target, *ARGUMENTS, *INPUT).published()
    assert said in done.out
    assert ("fp16" in done.out, "fp64" in done.out) == (dtype == "float16", dtype == "float64")
    artifact = Artifact.open(target)
    weights = sum(artifact.manifest.files[name].bytes for name in ("weights.bf16", "weights.fp32", "residual.bin"))
    assert weights / artifact.manifest.source.bytes <= bound
    assert artifact.manifest.schema_version == 8
    bits = np.dtype(f"u{BY_NAME[restored].numpy.itemsize}")
    for name, array in artifact.checkpoint_tensors():
        expected = state[name].to(getattr(torch, restored)).view(getattr(torch, f"int{8 * bits.itemsize}"))
        assert array.dtype.name == restored
        np.testing.assert_array_equal(array.view(bits), expected.numpy().view(bits))
    if dtype == "bfloat16":
        drift = artifact.manifest.drift["cpu"].outputs["output"]["relative_l2"]
        assert drift["worst"] < 1e-5  # the weights are unchanged; only the order of sums differs


def test_a_value_beyond_fp32_is_rejected_with_its_tensor(cli: Cli, tmp_path: Path, target: Path) -> None:
    large = torch.zeros(128, dtype=torch.float64)
    large[3] = 1e39
    saved(tmp_path / "model.safetensors", "float64", **{"down.bias": large})
    said = "tensor 'down.bias' is fp64 and holds a number above fp32's largest"
    cli("checkpoint", tmp_path / "model.safetensors", "--out", target, *ARGUMENTS, *INPUT).refused(2, said)
