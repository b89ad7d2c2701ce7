"""``--format safetensors`` and ``--format hf``: exports for other programs; verified, restorable, never served."""

import json
from pathlib import Path

import pytest
import torch
from architectures import Cnn, Mlp, Tied, save, seeded
from converting import MLP, Cli
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.cli import run
from bf16kit.messages.errors import ArtifactError
from bf16kit.runtime.loading import choose_profiles, load

Tensors = dict[str, torch.Tensor]
CONV = ("--model", "architectures:Cnn", "--input", "x:float32:batch,3,16,16")
SAFETENSORS = ("--format", "safetensors", "--no-report")
_ALONE = {
    "golden.safetensors",
    "manifest.json",
    "measurements.json",
    "model.safetensors",
    "reference.onnx",
    "residual.bin",
}


class Lstm(torch.nn.Module):
    """x [batch, 5, 16] → [batch, 10]. ONNX orders the gates in its weights differently from torch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.LSTM(16, 24, batch_first=True)
        self.head = torch.nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.inner(x)[0][:, -1])
        return result


def _exported(target: Path) -> Tensors:
    """Return the tensors of the export, by name."""
    index = target / "model.safetensors.index.json"
    if not index.is_file():
        return load_file(target / "model.safetensors")
    weight_map = json.loads(index.read_bytes())["weight_map"]
    return {name: load_file(target / file)[name] for name, file in weight_map.items()}


def _assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def _rounded(state: Tensors, *names: str) -> Tensors:
    return {name: tensor.bfloat16() if name in names else tensor for name, tensor in state.items()}


def _restored(cli: Cli, target: Path) -> Tensors:
    out = target.parent / "restored.safetensors"
    cli("restore", target, "--out", out, "--force").published()
    return load_file(out)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, mlp_file: Path) -> Artifact:
    """Return ``mlp_file`` converted to an export alone."""
    path = tmp_path_factory.mktemp("repository") / "m" / "1"
    assert run(["checkpoint", str(mlp_file), "--out", str(path), *MLP, *SAFETENSORS]) == 0
    return Artifact.open(path)


class TestExportAlone:
    @pytest.mark.long
    def test_holds_every_tensor_once_and_records_the_drift(self, alone: Artifact) -> None:
        manifest = alone.manifest
        assert {path.name for path in alone.path.iterdir()} == _ALONE
        assert (manifest.schema_version, manifest.profiles) == (8, {})
        assert manifest.exports["safetensors"].files == ["model.safetensors"]
        assert manifest.exports["safetensors"].verified == "host"
        assert 1e-4 < manifest.drift["safetensors"].outputs["output"]["relative_l2"]["mean"] < 1.5e-2

    def test_rounds_matrices_to_nearest_and_leaves_the_rest_unchanged(self, alone: Artifact, mlp_file: Path) -> None:
        _assert_same(_exported(alone.path), _rounded(torch.load(mlp_file), "up.weight", "down.weight"))
        with safe_open(alone.path / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}

    def test_restores_the_source_bit_for_bit_and_verifies_again(
        self, cli: Cli, alone: Artifact, mlp_file: Path, tmp_path: Path
    ) -> None:
        cli("restore", alone.path, "--out", tmp_path / "fp32.safetensors").published()
        _assert_same(load_file(tmp_path / "fp32.safetensors"), torch.load(mlp_file))
        assert "safetensors" in cli("verify", alone.path).published().out
        assert "Exports, for other programs" in cli("inspect", alone.path).published().out
        inspected = json.loads(cli("inspect", alone.path, "--json").published().out)
        assert inspected["exports"]["safetensors"]["verified"] == "host"

    @pytest.mark.long
    def test_has_half_the_checkpoint_s_size_and_all_of_it_with_the_residual(
        self, cli: Cli, tmp_path: Path, target: Path
    ) -> None:
        source = save(tmp_path / "m.pt", Mlp(16, 8192))
        wide = ("--model", "architectures:Mlp", "--model-args", '{"hidden": 8192}', "--input", "x:float32:batch,16")
        cli("checkpoint", source, "--out", target, *wide, *SAFETENSORS).published()
        size = sum(tensor.nbytes for tensor in torch.load(source).values())
        assert (target / "model.safetensors").stat().st_size <= 0.53 * size
        assert sum(path.stat().st_size for path in target.iterdir()) <= 1.06 * size

    @pytest.mark.long
    def test_no_batchnorm_is_folded_into_the_exported_weights(self, cli: Cli, tmp_path: Path, target: Path) -> None:
        source = save(tmp_path / "m.pt", Cnn())
        cli("checkpoint", source, "--out", target, *CONV, *SAFETENSORS).published()
        state = torch.load(source)
        matrices = [
            name for name, tensor in state.items() if sum(d > 1 for d in tensor.shape) > 1 and tensor.numel() >= 256
        ]
        assert matrices
        _assert_same(_exported(target), _rounded(state, *matrices))
        _assert_same(_restored(cli, target), state)

    @pytest.mark.long
    def test_tied_weights_are_exported_under_both_names(self, cli: Cli, tmp_path: Path, target: Path) -> None:
        source = save(tmp_path / "m.pt", Tied())
        tied = ("--model", "architectures:Tied", "--input", "ids:int64:batch,seq")
        cli("checkpoint", source, "--out", target, *tied, *SAFETENSORS).published()
        state = torch.load(source)
        _assert_same(_exported(target), _rounded(state, "table.weight", "out.weight", "inner.weight"))
        _assert_same(_restored(cli, target), state)

    @pytest.mark.long
    def test_weights_that_the_graph_holds_in_another_order_are_measured_as_well(
        self, cli: Cli, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import architectures

        monkeypatch.setattr(architectures, "Lstm", Lstm, raising=False)
        source = save(tmp_path / "m.pt", Lstm())
        lstm = ("--model", "architectures:Lstm", "--input", "x:float32:batch,5,16")
        cli("checkpoint", source, "--out", target, *lstm, *SAFETENSORS).published()
        manifest = Artifact.open(target).manifest
        assert (
            "weights that the reference holds in another order were rounded as well"
            in manifest.exports["safetensors"].note
        )
        module = seeded(Lstm())
        module.load_state_dict({name: tensor.float() for name, tensor in _exported(target).items()})
        x = torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected, found = seeded(Lstm())(x), module(x)
        measured = manifest.drift["safetensors"].outputs["output"]["relative_l2"]["mean"]
        assert measured == pytest.approx(float((found - expected).norm() / expected.norm()), rel=0.5)
        _assert_same(_restored(cli, target), torch.load(source))

    @pytest.mark.long
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_other_precisions_are_rounded_once_from_their_fp32_values(
        self, cli: Cli, tmp_path: Path, target: Path, dtype: torch.dtype
    ) -> None:
        state = {name: tensor.to(dtype) for name, tensor in seeded(Mlp()).state_dict().items()}
        torch.save(state, tmp_path / "m.pt")
        cli("checkpoint", tmp_path / "m.pt", "--out", target, *MLP, *SAFETENSORS).published()
        expected = {n: t.float().bfloat16() if n.endswith("weight") else t for n, t in state.items()}
        _assert_same(_exported(target), expected)
        fp32 = {n: t.float() if dtype is torch.float64 and n.endswith("weight") else t for n, t in state.items()}
        _assert_same(_restored(cli, target), fp32)

    @pytest.mark.long
    def test_the_export_of_an_onnx_file_has_its_initializers(self, cli: Cli, onnx_file: Path, target: Path) -> None:
        cli("checkpoint", onnx_file, "--out", target, *SAFETENSORS).published()
        found = _exported(target)
        assert torch.bfloat16 in {tensor.dtype for tensor in found.values()}
        restored = _restored(cli, target)
        assert restored.keys() == found.keys()
        for name, tensor in restored.items():
            assert torch.equal(found[name], tensor.to(found[name].dtype)), name

    @pytest.mark.long
    def test_without_a_residual_nothing_is_restored_and_no_reference_is_kept(
        self, cli: Cli, mlp_file: Path, target: Path
    ) -> None:
        cli("checkpoint", mlp_file, "--out", target, *MLP, *SAFETENSORS, "--no-residual").published()
        assert {path.name for path in target.iterdir()} == _ALONE - {"residual.bin", "reference.onnx"}
        assert Artifact.open(target).manifest.drift["safetensors"].outputs["output"]["relative_l2"]["mean"] > 1e-4
        assert "without a residual there is no fp32 reference" in cli("verify", target).published().out
        cli("restore", target, "--out", target.parent / "r").refused(2, "keeps no residual")

    def test_an_export_cannot_be_served_and_the_error_states_why(self, cli: Cli, alone: Artifact, target: Path) -> None:
        said = r"is an export \(safetensors\) for other programs to load: it has no profile to serve.*--format onnx"
        for ask in (lambda: choose_profiles(alone, "auto", "cpu"), lambda: load(alone, "cpu")):
            with pytest.raises(ArtifactError, match=said):
                ask()
        cli("explain", alone.path).refused(2, "is an export without ONNX profiles")
        cli("checkpoint", alone.path, "--out", target).refused(2, "is a bf16kit artifact already")


class TestExportBesideProfiles:
    @pytest.mark.long
    def test_onnx_and_torchscript_get_an_export_that_is_a_copy(self, cli: Cli, tmp_path: Path, target: Path) -> None:
        """Frameworks cannot read the graphs' weights, which are in panels and have BatchNorm folded in."""
        source = save(tmp_path / "m.pt", Cnn())
        formats = ("--format", "onnx", "--format", "torchscript", "--format", "safetensors", "--no-report")
        cli("checkpoint", source, "--out", target, *CONV, *formats).published()
        artifact = Artifact.open(target)
        assert {"cpu", "cuda", "torchscript"} <= artifact.manifest.profiles.keys()
        assert artifact.manifest.drift.keys() == artifact.manifest.profiles.keys() | {"safetensors"}
        assert "weights.bf16" in artifact.manifest.files
        state = torch.load(source)
        for name, tensor in _exported(target).items():
            assert torch.equal(tensor, state[name].to(tensor.dtype)), name
        _assert_same(_restored(cli, target), state)
        choose_profiles(artifact, "auto", "cpu")
        cli("verify", target, "--profile", "safetensors").published()

    @pytest.mark.long
    def test_shards_are_those_of_the_source(self, cli: Cli, tmp_path: Path, target: Path) -> None:
        state = dict(seeded(Mlp()).state_dict())
        files = {"a.safetensors": ["up.weight", "down.bias"], "b.safetensors": ["up.bias", "down.weight"]}
        for file, names in files.items():
            save_file({name: state[name] for name in names}, tmp_path / file)
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {name: file for file, names in files.items() for name in names}}))
        cli("checkpoint", index, "--out", target, *MLP, *SAFETENSORS).published()
        for number, names in enumerate(files.values(), start=1):
            assert load_file(target / f"model-0000{number}-of-00002.safetensors").keys() == set(names)
        exported = json.loads((target / "model.safetensors.index.json").read_bytes())
        assert exported["metadata"] == {"total_size": sum(t.nbytes for t in _exported(target).values())}
        _assert_same(_exported(target), _rounded(state, "up.weight", "down.weight"))
        _assert_same(_restored(cli, target), state)


class TestOptions:
    @pytest.mark.long
    @pytest.mark.parametrize(
        ("value", "flag", "stored"),
        [
            (torch.finfo(torch.float32).max, ("--saturate",), torch.finfo(torch.bfloat16).max),
            (1e-39, ("--subnormals", "flush"), 0),
        ],
    )
    def test_a_weight_that_bf16_cannot_hold_is_saturated_or_flushed_on_request_and_restored(
        self, cli: Cli, tmp_path: Path, target: Path, value: float, flag: tuple[str, ...], stored: float
    ) -> None:
        weight = seeded(Mlp()).state_dict()["up.weight"].clone()
        weight[0, 0] = value
        source = save(tmp_path / "m.pt", Mlp(), up__weight=weight)
        command = ("checkpoint", source, "--out", target, *MLP, *SAFETENSORS)
        if flag == ("--saturate",):
            cli(*command).refused(3, "'up.weight'", "--saturate")
        cli(*command, *flag, "--allow-over-budget", "--budget", "relative_l2=1e9").published()
        assert _exported(target)["up.weight"][0, 0] == stored
        _assert_same(_restored(cli, target), torch.load(source))

    @pytest.mark.long
    def test_over_budget_nothing_is_published_unless_weights_are_kept_in_fp32(
        self, cli: Cli, mlp_file: Path, target: Path
    ) -> None:
        """An export is not dropped with ``--drop-failing-profiles``."""
        tight = ("checkpoint", mlp_file, "--out", target, *MLP, *SAFETENSORS, "--budget", "relative_l2=1e-4")
        cli(*tight).refused(1, "export safetensors", "--keep-fp32")
        cli(*tight, "--format", "torchscript", "--drop-failing-profiles").refused(1, "export safetensors")
        assert not target.exists()
        cli(*tight, "--keep-fp32", "weight").published()
        _assert_same(_exported(target), torch.load(mlp_file))

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (
                (*SAFETENSORS, "--profile", "cpu"),
                "--profile cpu: profiles are only for ONNX; pass --format onnx as well",
            ),
            (("--format", "hf"), "copies the config and tokenizer of a Hugging Face directory"),
        ],
    )
    def test_options_that_do_not_fit_an_export_are_rejected(
        self, cli: Cli, mlp_file: Path, target: Path, given: tuple[str, ...], said: str
    ) -> None:
        cli("checkpoint", mlp_file, "--out", target, *MLP, *given).refused(2, said)
