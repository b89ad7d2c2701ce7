"""What a conversion reports about how its profiles ran when it verified them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from converting import MLP, ONNX_ONLY, Cli

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.tensors import describe
from bf16kit.runtime import torchruntimes
from bf16kit.runtime.ort import kernel
from converter.verify.observedshapes import with_observed_shapes


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    """Return a model of two layers, each a product that the CPU kernel runs."""
    path = tmp_path / "layers.onnx"
    onnx.save(graphs.mlp((64, 96, 40)), path)
    return path


@pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
def test_manifest_report_and_inspect_say_that_the_kernel_ran_and_verify_names_its_path(
    cli: Cli, layers: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernel.VARIABLE, "portable")
    out = cli("checkpoint", layers, "--out", target, "--profile", "cpu", "--format", "onnx").published().out
    said = "when verified: on the CPU kernel"
    assert Artifact.open(target).manifest.profiles["cpu"].note == said
    assert said in (target / "report.html").read_text("utf-8")
    assert said in cli("inspect", target).published().out
    assert "no CPU kernel" not in out
    assert "portable" not in (target / "manifest.json").read_text("utf-8")
    assert "cpu ran: on the CPU kernel, path portable" in cli("verify", target).published().out


def test_without_the_kernel_one_note_gives_the_reason_the_cost_and_the_remedy(
    cli: Cli, layers: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "LIBRARY", tmp_path / "_bf16kernel.so")
    monkeypatch.delenv(kernel.VARIABLE, raising=False)
    done = cli("checkpoint", layers, "--out", target, "--format", "onnx").published()
    (line,) = [line for line in (done.out + done.err).splitlines() if "CPU kernel" in line]
    assert line.startswith("note: no CPU kernel, because it was not built")
    assert "twice the memory" in line
    assert "install a C++17 compiler" in line
    assert "no CPU kernel, because it was not built" in Artifact.open(target).manifest.profiles["cpu"].note


def test_an_unknown_kernel_path_is_rejected_before_anything_is_read(
    cli: Cli, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernel.VARIABLE, "fast")
    cli("checkpoint", "absent.onnx", "--out", target).refused(2, "BF16KIT_KERNEL_PATH is 'fast'; allowed are")


@pytest.mark.long
@pytest.mark.parametrize("given", [None, 5, 11])
def test_torchscript_is_certified_in_both_arithmetics_on_the_same_samples_and_the_worse_counts(
    cli: Cli, mlp_file: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: int | None
) -> None:
    """The manifest does not depend on the CPU that converts. Of sixteen samples, those made of the given ones included,
    every second one runs, and the golden samples are chosen among those."""
    flags = [*MLP, "--format", "torchscript", "--no-report"]
    for index in range(given or 0):
        np.savez(tmp_path / f"{index:02}.npz", x=graphs.values(1, 16, seed=index))
    flags += ["--samples", str(tmp_path)] if given else []
    found = {}
    for native in (True, False):
        monkeypatch.setattr(torchruntimes, "cpu_has_bf16", lambda native=native: native)
        version = target.with_name(str(1 + native))
        cli("checkpoint", mlp_file, "--out", version, *flags).published()
        found[native] = Artifact.open(version).manifest
    assert found[True].drift == found[False].drift
    assert found[True].profiles == found[False].profiles
    assert found[True].files["golden.safetensors"] == found[False].files["golden.safetensors"]
    some = "" if given is None else " on 8 of 16 samples"
    assert found[True].profiles["torchscript"].note == (
        f"when verified: run in both arithmetics{some}; the drift is that of bf16, the worse"
    )
    if given is not None:
        assert found[True].drift["torchscript"].samples == -(-given // 2)  # made ones are not counted


@pytest.mark.parametrize(
    ("declared", "seen"),
    [
        (["batch", 16, "more"], ["batch", "y_1"]),
        ([1], ["y_0", "y_1"]),
        (["batch", 17], ["batch", "y_1"]),
        (["batch", 16], ["batch", 16]),
    ],
)
def test_an_outputs_shape_is_what_the_model_gives_whatever_is_declared(
    cli: Cli, tmp_path: Path, declared: list[int | str], seen: list[int | str]
) -> None:
    """ONNX Runtime returns the computed shape, so the manifest declares that shape to clients."""
    proto = graphs.mlp()
    proto.graph.output[0].CopyFrom(graphs.edge("y", declared))
    onnx.save(proto, tmp_path / "m.onnx")
    outcome = cli("checkpoint", tmp_path / "m.onnx", "--out", tmp_path / "m" / "1", *ONNX_ONLY)
    assert outcome.code == 0, outcome.err
    assert list(Artifact.open(tmp_path / "m" / "1").manifest.outputs[0].shape) == seen
    said = f"output 'y' is declared as {describe(declared)}, but the model gives [2,16]"
    assert (said in outcome.out) is (declared != seen)


def test_an_output_whose_rank_depends_on_the_sample_is_rejected_by_name(small: Artifact) -> None:
    found = [{"y": np.zeros(shape)} for shape in ((2, 3), (4, 3), (3,))]
    with pytest.raises(ConversionError, match=r"output 'y' is \[2,3\] for one sample and \[3\] for another; export"):
        with_observed_shapes(small.manifest, [{"x": np.zeros((2, 16))}] * 3, found, None)


def test_a_long_error_of_onnx_runtime_leaves_room_for_the_remedy(cli: Cli, tmp_path: Path) -> None:
    """A body's dimensions contradict its product's, so the error names every node around it, and both shapes."""
    proto = graphs.if_branches()
    proto.graph.input[0].CopyFrom(graphs.edge("x", ["batch", "width"]))
    onnx.save(proto, tmp_path / "m.onnx")
    outcome = cli("checkpoint", tmp_path / "m.onnx", "--out", tmp_path / "m" / "1", *ONNX_ONLY)
    outcome.refused(
        3, "m.onnx: the fp32 reference does not run on random inputs (seed 0)", "pass others with --samples"
    )
    said = outcome.err.split("error: ")[1]
    assert len(said) <= 600 + len(str(tmp_path)), said
    assert "If 'choice': MatMul" in said
