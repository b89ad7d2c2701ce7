"""Whole conversions: what they publish, that running it verifies it, and that the bytes are reproducible."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from architectures import Mlp, seeded
from converting import MLP, ONNX_ONLY, Cli, tree
from restored import assert_restored

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.convert import convert
from bf16kit.converter.options import Options, parse_target
from bf16kit.runtime.loading import load_reference

WEIGHTS = {
    "golden.safetensors", "manifest.json", "measurements.json", "reference.onnx", "report.html", "residual.bin",
    "weights.bf16", "weights.fp32",
}  # fmt: skip
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


def test_measurements_keep_the_rows_that_the_manifest_summarises(mlp: Artifact) -> None:
    measured = mlp.measurements()
    assert measured is not None
    assert measured.profiles.keys() == mlp.manifest.profiles.keys()
    for profile, entry in mlp.manifest.drift.items():
        columns = measured.profiles[profile].outputs["output"]
        assert len(columns.relative_l2) == columns.measured == entry.samples
        assert entry.outputs["output"]["relative_l2"]["mean"] == pytest.approx(np.mean(columns.relative_l2))
        assert entry.outputs["output"]["max_abs"]["worst"] == pytest.approx(max(columns.max_abs))
    narrow = {tensor.name: tensor for tensor in mlp.manifest.tensors if tensor.dtype == "bfloat16"}
    assert measured.ranges.tensors.keys() == narrow.keys()
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
@pytest.mark.parametrize(("profiles", "axes"), [(("cpu", "cuda"), {1, None}), (("cuda",), {None})])
def test_weights_are_stored_as_panels_only_for_the_profile_that_reads_panels(
    profiles: tuple[str, ...], axes: set[int | None], cli: Cli, onnx_file: Path, target: Path
) -> None:
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    cli("checkpoint", onnx_file, "--out", target, *chosen, *ONNX_ONLY).published()
    manifest = Artifact.open(target).manifest
    # The kernel reads the wide weight of the two.
    assert {entry.panels for entry in manifest.tensors if entry.dtype == "bfloat16"} == axes
    out = target.parent / "fp32.safetensors"
    cli("restore", target, "--out", out).published()
    assert_restored(out, graphs.weights_of(onnx.load(onnx_file)))


@pytest.mark.long
def test_a_model_that_mixes_its_batch_gets_no_batch_axis(cli: Cli, mlp_file: Path, target: Path) -> None:
    flags = ("--model", "architectures:Centred", *MLP[2:], *ONNX_ONLY, "--allow-over-budget")
    done = cli("checkpoint", mlp_file, "--out", target, *flags).published()
    assert "no batch axis: it was not confirmed" in done.out
    assert "all rows of a feed count as one sample" in done.out
    assert Artifact.open(target).manifest.batch_axis is None


def test_torchscript_of_an_onnx_file_is_an_error(cli: Cli, onnx_file: Path, target: Path) -> None:
    command = ("checkpoint", onnx_file, "--out", target)
    cli(*command, "--format", "torchscript").refused(3, "--format torchscript: this format is made from a torch module")


@pytest.mark.long
def test_convert_can_be_called_without_a_command_line(onnx_file: Path, target: Path) -> None:
    result = convert(Options(source=onnx_file, target=parse_target(target), formats=("onnx",)))
    assert result.artifact.path == target
    assert any("because --samples was not given" in note for note in result.notes)
