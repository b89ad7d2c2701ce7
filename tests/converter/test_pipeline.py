"""Whole conversions: what they publish, that running it verifies it, and that the bytes are reproducible."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from architectures import Mlp, Tied, save, seeded
from converting import MLP, ONNX_ONLY, Cli, tree
from restored import assert_restored

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.runtime.loading import load, load_reference
from converter.convert import convert
from converter.options import Options, parse_target

WEIGHTS = {
    "golden.safetensors",
    "manifest.json",
    "measurements.json",
    "reference.onnx",
    "report.html",
    "residual.bin",
    "weights.bf16",
    "weights.fp32",
}
ONNX = {"cpu.onnx", "cpu-bf16.onnx", "cuda.onnx"}


def test_everything_is_published_in_one_directory(mlp: Artifact) -> None:
    assert set(tree(mlp.path)) == WEIGHTS | ONNX | {"model.torchscript.pt"}
    assert set(mlp.manifest.files) == set(tree(mlp.path)) - {"manifest.json"}
    mlp.verify()


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        (["--profile", "cpu"], {"cpu.onnx"}),
        (["--profile", "cpu", "--profile", "cuda", "--profile", "cpu"], {"cpu.onnx", "cuda.onnx"}),
        ([], ONNX),
        (["--format", "torchscript"], {"model.torchscript.pt"}),  # the weights are kept for its reference
    ],
)
def test_the_requested_formats_and_profiles_are_written(
    cli: Cli, mlp_file: Path, target: Path, arguments: list[str], more: set[str]
) -> None:
    cli("checkpoint", mlp_file, "--out", target, *MLP, *arguments).published()
    assert set(tree(target)) == WEIGHTS | more
    assert load_reference(Artifact.open(target)).info.profile == "reference"
    cli("verify", target).published()


@pytest.mark.long
def test_torchscript_without_a_residual_has_no_onnx_file(cli: Cli, mlp_file: Path, target: Path) -> None:
    cli("checkpoint", mlp_file, "--out", target, *MLP, "--format", "torchscript", "--no-residual").published()
    assert not list(target.glob("*.onnx"))
    cli("verify", target).published()


def test_measurements_have_the_range_of_every_bf16_tensor(mlp: Artifact) -> None:
    measured = mlp.measurements()
    assert measured is not None
    narrow = {tensor.name for tensor in mlp.manifest.tensors if tensor.dtype == "bfloat16"}
    assert measured.ranges.tensors.keys() == narrow
    for name, counts in measured.ranges.tensors.items():
        assert counts.max_abs == np.abs(mlp.restore(name)).max()


def test_every_profile_was_run_and_the_manifest_states_where(mlp: Artifact) -> None:
    manifest = mlp.manifest
    assert {name: profile.verified for name, profile in manifest.profiles.items()} == {
        "cpu": "host",
        "cpu-bf16": "host",
        "cuda": "emulated",
        "torchscript": "host",
    }
    assert manifest.drift.keys() == manifest.profiles.keys()
    assert [entry.emulated for _, entry in sorted(manifest.drift.items())] == [False, False, True, False]
    assert all(entry.outputs["output"]["relative_l2"]["mean"] > 0 for entry in manifest.drift.values())
    assert manifest.batch_axis == 0


def test_the_reference_gives_the_outputs_of_the_source(mlp: Artifact) -> None:
    x = np.random.default_rng(1).standard_normal((3, 16), np.float32)
    with torch.no_grad():
        expected = seeded(Mlp())(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(load_reference(mlp).run({"x": x})["output"], expected, rtol=1e-5, atol=1e-6)


def test_no_published_file_contains_a_path_of_this_machine(mlp: Artifact, mlp_file: Path) -> None:
    places = [str(mlp.path.parent), str(mlp_file.parent), str(Path(__file__).parents[2])]
    for name in tree(mlp.path):
        data = (mlp.path / name).read_bytes()
        assert not [place for place in places if place.encode() in data], name


@pytest.mark.long
@pytest.mark.parametrize(
    "build", [graphs.embedding, partial(graphs.conv_bn, channels=16), graphs.if_branches, graphs.loop]
)
def test_weights_of_onnx_files_are_restored_bit_for_bit_wherever_they_were(
    cli: Cli, tmp_path: Path, target: Path, build: object
) -> None:
    """They were in initializers, Constant nodes or bodies of If and Loop, or a BatchNorm was folded into them."""
    source, out = tmp_path / "m.onnx", tmp_path / "fp32.safetensors"
    model: onnx.ModelProto = build()  # type: ignore[operator]
    onnx.save(model, source)
    cli("checkpoint", source, "--out", target, *ONNX_ONLY, "--allow-over-budget").published()
    cli("restore", target, "--out", out).published()
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.data_type == 1}
    for node in model.graph.node:
        for attribute in node.attribute:
            weights |= {t.name: onnx.numpy_helper.to_array(t) for t in attribute.g.initializer}
            weights |= {
                n.output[0]: onnx.numpy_helper.to_array(n.attribute[0].t)
                for n in attribute.g.node
                if n.op_type == "Constant"
            }
    assert_restored(out, weights)


@pytest.mark.long
def test_a_tied_table_is_stored_once_in_panels_restored_twice_and_gives_the_outputs_of_the_source(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    flags = ("--model", "architectures:Tied", "--input", "ids:int64:batch,seq", *ONNX_ONLY)
    cli("checkpoint", save(tmp_path / "tied.pt", Tied()), "--out", target, *flags).published()
    artifact, ids = Artifact.open(target), np.array([[0, 63, 5], [-1, 31, 32]])
    assert {entry.name: entry.panels for entry in artifact.manifest.tensors}["table.weight"] == 0
    plan = artifact.manifest.plan
    assert [e.reason for e in plan.nodes["cpu"] if "looks rows up" in e.reason and "in panels" in e.reason]
    module, from_the_start = seeded(Tied()), torch.from_numpy(ids % 64)
    with torch.no_grad():
        expected = module(from_the_start).numpy()
        for weight in module.parameters():
            if weight.ndim == 2:
                weight.copy_(weight.bfloat16())
        rounded = module(from_the_start).numpy()
    np.testing.assert_allclose(load_reference(artifact).run({"ids": ids})["output"], expected, atol=1e-5)
    np.testing.assert_allclose(load(artifact, "cpu").run({"ids": ids})["output"], rounded, atol=1e-5)
    state = {name: tensor.numpy() for name, tensor in seeded(Tied()).state_dict().items()}
    assert len(artifact.manifest.tensors) < len(state)
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert_restored(tmp_path / "fp32.safetensors", state)


@pytest.mark.long
@pytest.mark.parametrize(("profiles", "axes"), [(("cpu", "cuda"), {1}), (("cuda",), {None})])
def test_weights_are_stored_as_panels_only_for_the_profile_that_reads_panels(
    profiles: tuple[str, ...], axes: set[int | None], cli: Cli, onnx_file: Path, target: Path
) -> None:
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    cli("checkpoint", onnx_file, "--out", target, *chosen, *ONNX_ONLY).published()
    manifest = Artifact.open(target).manifest
    assert {entry.panels for entry in manifest.tensors if entry.dtype == "bfloat16"} == axes
    out = target.parent / "fp32.safetensors"
    cli("restore", target, "--out", out).published()
    assert_restored(out, graphs.weights_of(onnx.load(onnx_file)))


@pytest.mark.long
def test_a_model_that_mixes_its_batch_gets_no_batch_axis(cli: Cli, mlp_file: Path, target: Path) -> None:
    flags = ("--model", "architectures:Centred", *MLP[2:], *ONNX_ONLY, "--allow-over-budget")
    done = cli("checkpoint", mlp_file, "--out", target, *flags).published()
    assert "no batch axis" in done.out
    assert Artifact.open(target).manifest.batch_axis is None


@pytest.mark.long
def test_drift_over_budget_is_an_error_unless_it_is_allowed(cli: Cli, onnx_file: Path, target: Path) -> None:
    command = ("checkpoint", onnx_file, "--out", target, *ONNX_ONLY, "--no-search", "--budget", "relative_l2=1e-6")
    cli(*command).refused(1, "profile cpu, output 'y': relative_l2 is", "the budget allows at most 1e-06")
    assert not target.exists()
    done = cli(*command, "--allow-over-budget").published()
    assert "published because of --allow-over-budget" in done.out
    assert Artifact.open(target).manifest.budget["relative_l2"] == 1e-6


def test_torchscript_of_an_onnx_file_is_an_error(cli: Cli, onnx_file: Path, target: Path) -> None:
    command = ("checkpoint", onnx_file, "--out", target)
    cli(*command, "--format", "torchscript").refused(3, "--format torchscript: this format is made from a torch module")


@pytest.mark.long
def test_convert_can_be_called_without_a_command_line(onnx_file: Path, target: Path) -> None:
    result = convert(Options(source=onnx_file, target=parse_target(target), formats=("onnx",)))
    assert result.artifact.path == target
    assert any("because --samples was not given" in note for note in result.notes)
