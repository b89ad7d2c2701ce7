"""What running the profiles shows: how they ran, the outputs' shapes, and whether there is a batch axis.

A batch axis is declared only if samples give the same outputs in any company as alone.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from computed import IN, OUT, Computed
from converting import MLP, ONNX_ONLY, Cli

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.verify.observedshapes import batch_axis, with_observed_shapes
from bf16kit.messages.errors import ConversionError, RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec, describe
from bf16kit.runtime import Array, torchruntimes
from bf16kit.runtime.ort import kernel


@pytest.mark.long
@pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
def test_manifest_report_and_inspect_say_that_the_kernel_ran_and_verify_names_its_path(
    cli: Cli, onnx_file: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernel.VARIABLE, "portable")
    out = cli("checkpoint", onnx_file, "--out", target, "--profile", "cpu", "--format", "onnx").published().out
    said = "when verified: on the CPU kernel"
    assert Artifact.open(target).manifest.profiles["cpu"].note == said
    assert said in (target / "report.html").read_text("utf-8")
    assert said in cli("inspect", target).published().out
    assert "no CPU kernel" not in out
    assert "portable" not in (target / "manifest.json").read_text("utf-8")
    assert "cpu ran: on the CPU kernel, path portable" in cli("verify", target).published().out


@pytest.mark.long
def test_without_the_kernel_one_note_gives_the_reason_the_cost_and_the_remedy(
    cli: Cli, onnx_file: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "LIBRARY", tmp_path / "_bf16kernel.so")
    monkeypatch.delenv(kernel.VARIABLE, raising=False)
    done = cli("checkpoint", onnx_file, "--out", target, "--format", "onnx").published()
    (line,) = [line for line in (done.out + done.err).splitlines() if "note: " in line and "CPU kernel" in line]
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
        (tmp_path / "cpuinfo").write_text("flags : avx512_bf16\n" if native else "flags : sse2\n")
        monkeypatch.setattr(torchruntimes, "CPUINFO", tmp_path / "cpuinfo")
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


@pytest.mark.long
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


def test_the_note_on_a_shape_shows_one_that_contradicts_the_declared_one(small: Artifact) -> None:
    found = [{"y": np.zeros(shape)} for shape in ((2, 16), (2, 15))]
    _, notes = with_observed_shapes(small.manifest, [{"x": np.zeros((2, 16))}] * 2, found, None)
    assert notes == [
        "output 'y' is declared as [batch,16], but the model gives [2,15]; the artifact declares [batch,y_1]"
    ]


PAIR = [{"x": np.arange(8, dtype=np.float32).reshape(2, 4)}]
THREE = [{"x": np.arange(12, dtype=np.float32).reshape(3, 4)}]
FILLS = (-1e9, 1e9, np.inf, -np.inf, np.nan)


def _only_singles(x: Array) -> Array:
    if len(x) != 1:
        raise RuntimeFailure("a Reshape with a fixed size")
    return x


def _filled(value: float, function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return ``function`` with one slot filled: a norm over the whole sample sees the fill alone."""

    def filled(x: Array) -> Array:
        y = np.array(function(x))
        y[:, 0] = value
        return y

    return filled


def _leaking(scale: float) -> Callable[[Array], Array]:
    """Return a model with one channel that leaks, and one that is far larger."""

    def function(x: Array) -> Array:
        y = x * np.float32(1e-3)
        y[:, 1] += 1e-4 * x[:, 1].mean()
        y[:, 0] = x[:, 0] * scale
        return y

    return function


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: x * np.float32(1 + 1e-6 * len(x)),  # sums in another order: fp32 noise
        *(_filled(value, lambda x: 2 * x) for value in FILLS),
    ],
)
def test_a_model_whose_rows_do_not_interact_has_a_batch_axis(function: Callable[[Array], Array]) -> None:
    assert batch_axis(Computed(function), IN, OUT, PAIR) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(0),  # mixes samples
        *(_filled(value, lambda x: x - x.mean(0)) for value in FILLS),
        _leaking(1e6),
        _leaking(1e3),
        lambda x: x + 0.01 * (x - x[:1]),  # the first row is right in every batch, the others get a share of it
        lambda x: x + 0 * x.sum(0),  # shows only when a companion is infinite
        lambda x: x * (1 if len(x) < 3 else 2),  # only three samples show it
        lambda x: x * len(x),
        lambda x: x * len(np.unique(x, axis=0)) / len(x),  # only a copy of a row shows it
        lambda x: x[:1],  # gives one row only
        lambda x: np.where(len(x) > 1, np.nan, x),
        _only_singles,
    ],
)
def test_a_model_whose_rows_interact_has_none(function: Callable[[Array], Array]) -> None:
    with np.errstate(invalid="ignore"):
        assert batch_axis(Computed(function), IN, OUT, THREE) is None


def test_integers_beside_floats_do_not_keep_these_from_being_extreme() -> None:
    inputs = (*IN, TensorSpec("ids", "int64", ("n",)))
    feeds = [feed | {"ids": np.arange(3)} for feed in THREE]
    with np.errstate(invalid="ignore"):
        assert batch_axis(Computed(lambda x: x + 0 * x.sum(0)), inputs, OUT, feeds) is None


def test_a_row_beside_an_extreme_one_is_not_compared_with_the_row_alone() -> None:
    """Its sums may have another order alone, and one row shows no variation by which such noise could be excused."""
    feeds = [{"x": np.random.default_rng(seed).standard_normal((1, 4)).astype(np.float32)} for seed in range(3)]
    step = np.array([1, -1, 1, -1], np.float32)

    def reordered(x: Array) -> Array:
        return np.asarray(x + (3e-5 * step if len(x) > 1 else 0), np.float32)

    assert batch_axis(Computed(reordered), IN, OUT, feeds) == 0


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ((TensorSpec("x", "float32", (2, 4)),), OUT),
        (IN, (TensorSpec("y", "float32", (1, 4)),)),
        (IN, (TensorSpec("y", "float32", ()),)),
        ((*IN, TensorSpec("z", "float32", ("m", 4))), OUT),
        ((*IN, TensorSpec("steps", "int64", ())), OUT),
    ],
    ids=["fixed input", "fixed output", "scalar output", "two names", "scalar input"],
)
def test_shapes_alone_can_rule_out_a_batch_axis(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> None:
    assert batch_axis(Computed(lambda x: x), inputs, outputs, PAIR) is None


def test_two_feeds_of_one_row_and_the_same_shape_are_a_pair() -> None:
    feeds = [{"x": np.array([row], np.float32)} for row in ((1, 2), (1, 2, 3), (4, 5, 6))]
    assert batch_axis(Computed(lambda x: x * 2), IN, OUT, feeds) == 0
    assert batch_axis(Computed(lambda x: x * 2), IN, OUT, feeds[:2]) is None  # no pair: nothing was compared
