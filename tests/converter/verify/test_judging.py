"""What is judged by the budget: bounds, profiles and golden samples; and what is published then."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from converting import ONNX_ONLY, Cli, tree

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.convert import convert
from bf16kit.converter.options import Options, parse_target
from bf16kit.converter.verify.golden import rows_kept
from bf16kit.converter.verify.judging import check_budget, with_output_kinds
from bf16kit.drift.budget import Budget
from bf16kit.numerics.rounding import to_bf16, to_fp32
from bf16kit.numerics.tensors import TensorSpec

OUTPUT = TensorSpec("y", "float32", ("batch", 4))


@pytest.fixture(scope="session")
def wide_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of two products that are wide enough for the kernel's panels."""
    path = tmp_path_factory.mktemp("wide") / "wide.onnx"
    onnx.save(graphs.mlp((64, 96, 40)), path)
    return path


def test_an_unknown_output_and_a_stated_bound_that_applies_to_none_are_rejected(
    cli: Cli, onnx_file: Path, target: Path
) -> None:
    asked = ("checkpoint", onnx_file, "--out", target)
    cli(*asked, "--output", "z:logits").refused(2, "--output z: the model's outputs are y")
    said = "--budget top1_agreement=1: no output is known to hold logits ('y' is of kind other)", "--output y:logits"
    cli(*asked, "--budget", "top1_agreement=1.0").refused(2, *said)
    assert not target.parent.exists()


def test_an_unjudged_default_bound_is_noted_if_an_output_could_hold_logits() -> None:
    (note,) = check_budget(Budget(), [OUTPUT])
    assert note.startswith("top1_agreement was not judged: no output is known to hold logits ('y' is of kind other)")
    assert note.endswith("--output y:logits")
    (note,) = check_budget(Budget(), [OUTPUT, replace(OUTPUT, name="z")])
    assert "('y' is of kind other, 'z' is of kind other)" in note
    assert note.endswith("--output NAME:logits")
    assert check_budget(Budget(), with_output_kinds([OUTPUT], {"y": "embedding"})) == []
    assert check_budget(Budget.parse(["top1_agreement=none"]), [OUTPUT]) == []
    (note,) = check_budget(Budget.parse(["top1_agreement=none"]), [TensorSpec("label", "int64", ("n",), "logits")])
    assert note.startswith("nothing judges 'label'")
    assert check_budget(Budget.parse(["top1_agreement=1"]), with_output_kinds([OUTPUT], {"y": "logits"})) == []


@pytest.mark.long
def test_a_profile_over_budget_may_be_left_out_unless_every_profile_is(cli: Cli, onnx_file: Path, target: Path) -> None:
    command = ("checkpoint", onnx_file, "--out", target, *ONNX_ONLY, "--no-search", "--drop-failing-profiles")
    cli(*command, "--budget", "relative_l2=1e-9").refused(1, "Every profile is over budget", "profile cuda")
    assert not target.parent.exists()
    # The cuda profile of the small model drifts more than this, the cpu profile less.
    assert "left out, drift over budget: cuda" in cli(*command, "--budget", "relative_l2=3e-3").published().out
    manifest = Artifact.open(target).manifest
    assert set(manifest.profiles) == set(manifest.drift) == set(manifest.plan.nodes) == {"cpu", "cpu-bf16"}
    assert "cuda.onnx" not in tree(target)
    cli("verify", target).published()


@pytest.mark.long
def test_an_error_that_a_level_hides_from_the_budget_is_noted(cli: Cli, tmp_path: Path, target: Path) -> None:
    """A forecast around another level in each sample. The profile cpu adds the level in fp32, cuda in bf16."""
    text = """(float[n, 64] x) => (float[n, 64] y) { level = ReduceMean <keepdims = 1> (x, axis)
        centred = Sub (x, level) signal = MatMul (centred, w) y = Add (signal, level) }"""
    onnx.save(graphs.parsed(text, axis=np.array([1]), w=graphs.values(64, 64)), tmp_path / "m.onnx")
    x = 1e4 + 1e3 * graphs.values(16, 1, seed=1) + 5 * graphs.values(16, 64, seed=2)
    np.savez(tmp_path / "x.npz", x=x)
    command = ("checkpoint", tmp_path / "m.onnx", "--samples", tmp_path / "x.npz", "--out", target)
    noted = cli(*command).published().out
    assert "note: profile cuda: the error of output 'y' is " in noted
    assert "note: profile cpu" not in noted
    bounded = cli(*command, "--force", "--budget", "max_abs=1").published().out
    assert "the error of output" not in bounded


@pytest.mark.long
def test_an_error_of_values_too_small_to_be_judged_is_noted(cli: Cli, tmp_path: Path, target: Path) -> None:
    """Rates of 1e-9 beside values of 1: bf16 rounds the weights that tell them apart to the same number."""
    text = """(float[n, 16] x) => (float[n, 64] y) {
        signal = MatMul (x, w) total = ReduceSum (x, axis) level = Mul (total, offset)
        product = MatMul (x, near) difference = Sub (product, level) rate = Mul (difference, nano)
        y = Concat <axis = 1> (signal, rate) }"""
    weights = {"w": graphs.values(16, 32), "near": 256 + graphs.values(16, 32, seed=1)}
    scalars = {"offset": np.array(256, np.float32), "nano": np.array(1e-9, np.float32), "axis": np.array([1])}
    onnx.save(graphs.parsed(text, **weights, **scalars), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=8 * graphs.values(64, 16, seed=2))
    command = ("checkpoint", tmp_path / "m.onnx", "--samples", tmp_path / "x.npz", "--profile", "cpu", *ONNX_ONLY)
    assert "note: profile cpu: the error of index " in cli(*command, "--out", target).published().out
    mended = cli(*command, "--out", target, "--force", "--keep-fp32", "^near$").published().out
    assert "the error of index" not in mended


# On the wide model, the drift of cpu is 2.1e-3, of cpu-bf16 3.1e-3, of cuda 4.2e-3.
_CPU_ALONE = ("--budget", "relative_l2=2.5e-3", "--no-search")


@pytest.mark.long
@pytest.mark.parametrize("flag", ["--drop-failing-profiles", "--allow-over-budget"])
def test_an_optional_profile_over_budget_is_left_out_whatever_is_allowed(
    flag: str, cli: Cli, wide_file: Path, target: Path
) -> None:
    done = cli("checkpoint", wide_file, "--out", target, *ONNX_ONLY, *_CPU_ALONE, flag).published()
    assert "note: no profile cpu-bf16, which is faster on some processors: drift over budget" in done.out
    assert "profile cpu-bf16, output 'y': relative_l2 is 0.0030" in done.out
    manifest = Artifact.open(target).manifest
    assert "cpu-bf16" not in {*manifest.profiles, *manifest.drift, *manifest.plan.nodes}
    assert "cpu-bf16.onnx" not in tree(target)
    requested = cli(
        "checkpoint", wide_file, "--out", target, *ONNX_ONLY, *_CPU_ALONE, "--profile", "cpu-bf16", "--force"
    )
    requested.refused(1, "profile cpu-bf16, output 'y': relative_l2 is")


@pytest.mark.long
def test_cpu_bf16_without_a_product_that_rounds_is_left_out_or_rejected_if_requested(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    onnx.save(graphs.embedding(), tmp_path / "m.onnx")
    source = ("checkpoint", tmp_path / "m.onnx", "--out", target, *ONNX_ONLY)
    cli(*source, "--profile", "cpu-bf16").refused(
        2, "--profile cpu-bf16: it would equal cpu, because no product would round what it reads: "
    )
    cli(*source).published()
    assert {*Artifact.open(target).manifest.profiles} == {"cpu", "cuda"}


@pytest.mark.long
@pytest.mark.parametrize("requested", [False, True])
def test_convolutions_that_put_cpu_bf16_over_budget_are_left_in_fp32(
    requested: bool, cli: Cli, tmp_path: Path, target: Path
) -> None:
    """The product of the model is exact in bf16, on these samples; the convolutions are not."""
    text = """(float[batch,64,8,8] x, float[batch,64] z) => (float[batch,64,8,8] y, float[batch,32] t) {
        [a] h = Conv <pads = [1,1,1,1]> (x, v)
        [b] y = Conv <pads = [1,1,1,1]> (h, w)
        [c] t = MatMul (z, m)
    }"""
    shapes = {"v": (64, 64, 3, 3), "w": (64, 64, 3, 3), "m": (64, 32)}
    drawn = {name: graphs.values(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    weights = {name: to_fp32(to_bf16(array)) for name, array in drawn.items()}
    onnx.save(graphs.parsed(text, **weights), tmp_path / "m.onnx")
    x, z = (to_fp32(to_bf16(graphs.values(128, *shape))) for shape in ((64, 8, 8), (64,)))
    np.savez(tmp_path / "s.npz", x=x, z=z)
    default = ("--drop-failing-profiles", "--no-search")  # cuda is over budget
    profiles = ("--profile", "cpu", "--profile", "cpu-bf16") if requested else default
    done = cli(
        *("checkpoint", tmp_path / "m.onnx", "--out", target, "--samples", tmp_path / "s.npz", *ONNX_ONLY),
        *("--budget", "relative_l2=1e-4", *profiles),
    ).published()
    assert "note: cpu-bf16 leaves convolutions in fp32, because bf16 is over budget there:\n  profile" in done.out
    manifest = Artifact.open(target).manifest
    assert {*manifest.profiles} == {"cpu", "cpu-bf16"}
    planned = {entry.name: entry.precision for entry in manifest.plan.nodes["cpu-bf16"]}
    assert planned == {"a": "fp32", "b": "fp32", "c": "bf16"}
    assert {entry.name: entry.panels for entry in manifest.tensors} == {"v": None, "w": None, "m": 1}


@pytest.mark.long
def test_an_optional_profile_that_does_not_run_is_left_out(
    cli: Cli, wide_file: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(onnxruntime.InferenceSession):  # type: ignore[misc]  # it has no types
        def __init__(self, model: object, *arguments: object, **options: object) -> None:
            if "cpu-bf16.onnx" in str(model):
                raise RuntimeError("no such operator")
            super().__init__(model, *arguments, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Refusing)
    flags = ("checkpoint", wide_file, "--out", target, *ONNX_ONLY)
    cli(*flags, "--profile", "cpu-bf16").refused(3, "no such operator")
    assert "no profile cpu-bf16: the written graph does not run" in cli(*flags).published().out
    assert {*Artifact.open(target).manifest.profiles} == {"cpu", "cuda"}


@pytest.mark.long
def test_a_bound_on_a_quantile_is_stored_and_judged(cli: Cli, onnx_file: Path, tmp_path: Path, target: Path) -> None:
    flags = ("checkpoint", onnx_file, "--out", target, *ONNX_ONLY, "--profile", "cpu", "--no-search")
    cli(*flags, "--budget", "relative_l2.worst=1e-9").refused(1, "relative_l2.worst is", "at most 1e-09")
    cli(*flags, "--budget", "relative_l2.p99=1").refused(
        2, "the 99th percentile of 16 samples is not known; give 100 or more, or bound the worst"
    )
    samples = tmp_path / "samples.npz"
    np.savez(samples, x=np.random.default_rng(0).standard_normal((100, 16), np.float32))
    cli(*flags, "--samples", samples, "--budget", "relative_l2.p99=1").published()
    assert Artifact.open(target).manifest.budget["relative_l2.p99"] == 1
    assert "relative_l2.p99" in cli("verify", target, "--samples", samples).published().out


@pytest.mark.long
@pytest.mark.parametrize("apart", [2.0**-16, 2.0**-22])
def test_a_changed_top_class_is_rejected_though_the_numbers_hardly_change_but_a_tie_in_fp32_is_none(
    cli: Cli, tmp_path: Path, target: Path, apart: float
) -> None:
    """Of eight classes two always lead, which are equal in bf16; there the first of equal classes is chosen."""
    weight = np.zeros((32, 8), np.float32)
    weight[:, 0] = np.abs(graphs.values(32))
    weight[:, 1] = weight[:, 0] * np.float32(1 + apart)
    # Sums that do not cancel are equal but for fp32 noise.
    text = "(float[batch, 32] x) => (float[batch, 8] y) { [abs] m = Abs (x) [product] y = MatMul (m, w) }"
    onnx.save(graphs.parsed(text, w=weight), tmp_path / "m.onnx")
    command = ("checkpoint", tmp_path / "m.onnx", "--out", target, "--output", "y:logits", "--no-search", *ONNX_ONLY)
    if apart == 2.0**-16:
        assert "relative_l2" not in cli(*command).refused(1, "output 'y': top1_agreement is").err
    else:
        cli(*command).published()
        manifest = Artifact.open(target).manifest
        assert [output.kind for output in manifest.outputs] == ["logits"]
        assert manifest.drift["cpu"].outputs["y"]["top1_agreement"]["mean"] == 1.0


@pytest.mark.long
def test_a_model_with_a_scalar_output_verifies(tmp_path: Path, target: Path, cli: Cli) -> None:
    """If the stored golden output had another shape than the model's output, the drift would be infinite."""
    source = graphs.parsed(
        "(float[batch, 32] x) => (float y) { [product] h = MatMul (x, w) [sum] y = ReduceSum <keepdims = 0> (h) }",
        w=graphs.values(32, 32),
    )
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    cli("checkpoint", tmp_path / "m.onnx", "--out", target, *ONNX_ONLY).published()
    assert "every digest matches" in cli("verify", target).published().out


def _selecting(tmp_path: Path, rows: Sequence[Sequence[int]]) -> tuple[str | Path, ...]:
    """Return the arguments of a conversion up to ``--budget``; the caller appends the budget's value.

    There is one sample for each entry of ``rows``, and the model has one output for each element of an entry. The
    element is the row of the weight that this output shows. Rounding changes row 0 alone.
    """
    weight = np.full((32, 32), 1.0, np.float32)
    weight[0] = 1 + 2.0**-8.5
    names = range(len(rows[0]))
    inputs, outputs = (", ".join(f"float[batch, 32] {side}{i}" for i in names) for side in "xy")
    products = " ".join(f"[product{i}] y{i} = MatMul (x{i}, w{i})" for i in names)
    weights = {f"w{i}": weight * np.float32(1 + i) for i in names}
    source = graphs.parsed(f"({inputs}) => ({outputs}) {{ {products} }}", **weights)
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    (tmp_path / "samples").mkdir()
    for number, chosen in enumerate(rows):
        feed = {f"x{i}": np.eye(32, dtype=np.float32)[[row]] for i, row in enumerate(chosen)}
        np.savez(tmp_path / "samples" / f"{number:02}.npz", **feed)  # type: ignore[arg-type]  # arrays by keyword
    convert = ("checkpoint", tmp_path / "m.onnx", *ONNX_ONLY, "--samples", tmp_path / "samples", "--profile", "cpu")
    return (*convert, "--no-search", "--budget", "slice_error=none", "--budget")  # the outputs vary by rounding alone


@pytest.mark.long
def test_a_golden_sample_over_budget_is_replaced_by_one_within_budget(tmp_path: Path, target: Path, cli: Cli) -> None:
    """The mean of fifty samples is within budget but the first sample is not, so the second becomes the golden one."""
    convert = _selecting(tmp_path, [[0], *[[1]] * 49])
    done = cli(*convert, "relative_l2=1e-3", "--out", target).published()
    assert "note: the golden samples, on which a server checks each start, are sample 1:" in done.out
    assert np.argmax(Artifact.open(target).golden().inputs["x0"]) == 1
    cli("verify", target).published()
    within = cli(*convert, "relative_l2=1", "--out", target.with_name("2")).published()
    assert "golden samples" not in within.out
    assert np.argmax(Artifact.open(target.with_name("2")).golden().inputs["x0"]) == 0


@pytest.mark.long
def test_of_a_sample_of_many_rows_the_first_few_within_budget_become_golden(
    tmp_path: Path, target: Path, cli: Cli
) -> None:
    """The mean of 100 rows is within budget, but the first ten are not: then neither are rows 0 to 7, and 8 to 15."""
    convert = _selecting(tmp_path, [[0], *[[1]]])
    np.savez(tmp_path / "rows.npz", x0=np.eye(32, dtype=np.float32)[[0] * 10 + [1] * 90])
    convert = (*convert, "relative_l2=4e-4", "--samples", tmp_path / "rows.npz", "--report")
    done = cli(*convert, "--out", target).published()
    assert "on which a server checks each start, are rows 16 to 23 of sample 0: the first" in done.out
    golden = Artifact.open(target).golden()
    assert np.array_equal(golden.inputs["x0"], np.eye(32, dtype=np.float32)[[1] * 8])
    assert golden.outputs["y0"].shape == (8, 32)
    cli("verify", target).published()


@pytest.mark.parametrize(
    ("row", "scales", "checkpoint", "kept"),
    [
        *((100, 0, 0, 8), (8_000, 0, 0, 8), (8_001, 0, 0, 7), (100, 16_000, 0, 1), (1_000_000, 0, 0, 1)),
        *((12_500, 0, 40_000_000, 8), (50_000, 0, 40_000_000, 2), (10_000, 16_000, 40_000_000, 3)),
    ],
)
def test_golden_samples_are_bounded_but_for_their_first_row(row: int, scales: int, checkpoint: int, kept: int) -> None:
    """By 8 rows, and by 64 kB or 0.25 % of the checkpoint, with the ``scales`` that slices are judged against."""
    feeds, outputs = [{"x": np.zeros((64, row - 4), np.int8)}], [{"y": np.zeros((64, 4), np.int8)}]
    assert rows_kept(feeds, outputs, {"y": [np.zeros(scales)]}, checkpoint) == kept


@pytest.mark.long
def test_a_model_without_a_golden_sample_within_budget_is_not_published(tmp_path: Path, target: Path, cli: Cli) -> None:
    """The mean is within budget for both outputs, but each sample has one output over budget."""
    done = cli(*_selecting(tmp_path, [[0, 1], [1, 0], [0, 1], [1, 0]]), "relative_l2=2e-3", "--out", target)
    done.refused(1, "profile cpu, output 'y0': relative_l2", "on the golden samples alone")
    assert not target.exists()


def _flat(tmp_path: Path, firsts: Sequence[float]) -> Path:
    """Write a product whose weight is exact in bf16, and a sample filled with each of ``firsts``; return its path."""
    source = graphs.parsed(
        "(float[batch, 32] x) => (float[batch, 32] y) { [product] y = MatMul (x, w) }", w=np.sign(graphs.values(32, 32))
    )
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    (tmp_path / "samples").mkdir()
    for number, first in enumerate(firsts):
        np.savez(tmp_path / "samples" / f"{number:02}.npz", x=np.full((1, 32), first, np.float32))
    return tmp_path / "m.onnx"


def _with_optional(source: Path, target: Path) -> Artifact:
    options = Options(
        source=source,
        target=parse_target(target),
        samples=str(source.parent / "samples"),
        formats=("onnx",),
        profiles=("cpu",),
        optional=("cpu-bf16",),
        budget=Budget.parse(["relative_l2=1e-3", "slice_error=none"]),  # the outputs do not vary
        search=False,
        report=False,
    )
    return convert(options).artifact


_ROUNDED = 1 + 2.0**-9  # bf16 rounds it to 1


@pytest.mark.long
def test_golden_samples_are_those_on_which_an_optional_profile_is_within_budget_too(
    tmp_path: Path, target: Path, cli: Cli
) -> None:
    artifact = _with_optional(_flat(tmp_path, [_ROUNDED, *[1.0] * 20]), target)
    assert [*artifact.manifest.profiles] == ["cpu", "cpu-bf16"]
    assert artifact.golden().inputs["x"][0, 0] == 1
    assert " cpu-bf16 " in cli("verify", target).published().out


@pytest.mark.long
def test_an_optional_profile_without_a_golden_sample_within_budget_is_left_out(tmp_path: Path, target: Path) -> None:
    artifact = _with_optional(_flat(tmp_path, [_ROUNDED, _ROUNDED]), target)
    assert [*artifact.manifest.profiles] == ["cpu"]
    assert [name for name in tree(target) if "bf16." not in name and ("golden" in name or "cpu" in name)] == [
        "cpu.onnx",
        "golden.safetensors",
    ]
