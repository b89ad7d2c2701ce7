"""Drift over samples, the noise predicted for each value, and slices that are destroyed."""

import math
import os
import resource
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from computed import OUT, Computed
from destroyed import KINDS, write
from onnx import ModelProto, shape_inference
from peaks import measured_alone

import graphs
from bf16kit.converter.convert import convert
from bf16kit.converter.options import Options, parse_target
from bf16kit.converter.verify.layernoise import ROUNDING, Power, Rounded, predicted
from bf16kit.converter.verify.levels import levels_of, lost_in_samples
from bf16kit.converter.verify.measure import Expected, Spool, drifts, slice_scales, spool, summarise
from bf16kit.converter.verify.samples import Samples
from bf16kit.drift.metrics import compare
from bf16kit.messages.errors import BudgetExceeded, SamplesError
from bf16kit.numerics.rounding import to_bf16, to_fp32
from bf16kit.numerics.tensors import TensorSpec

LARGE_VOCABULARY = """
import numpy as np
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.converter.verify import measure
from bf16kit.converter.verify.samples import Samples
from peaks import anonymous, peak_anonymous

class Random:
    def __init__(self, noise):
        self.noise = np.float32(noise)
    def run(self, feeds):
        seed, = feeds["x"]
        answer = np.random.default_rng(seed).standard_normal((1, 32, 20_000), np.float32)
        answer += self.noise
        return {"y": answer}

spec = TensorSpec("y", "float32", ("n", 32, 20_000), "logits")
one = Random(0).run({"x": np.array([0])})["y"].nbytes
measure.drifts([{"y": np.ones((1, 4), np.float32)}], [{"y": np.ones((1, 4), np.float32)}], [spec], 0, {})
samples = Samples(tuple({"x": np.array([seed])} for seed in range(60)), "the test")
before = anonymous()
with peak_anonymous() as peak:
    expected = measure.spool(Random(0).run, samples, None)
    found = measure.drifts(expected, map(Random(1e-3).run, samples.feeds), [spec], 0, {})
assert measure.summarise(found)["y"].samples == 60
print(peak.bytes - before, one)
"""


def test_outputs_on_disk_come_back_bit_for_bit(tmp_path: Path) -> None:
    outputs = {
        "floats": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "bf16": np.array([1, np.nan], ml_dtypes.bfloat16),
        "flag": np.array(True),
        "nothing": np.empty((0, 3), np.int64),
        "text": np.array([b"a"], object),
    }
    kept = Spool(tmp_path, [outputs, {"floats": np.array([7.0])}])
    assert list(tmp_path.iterdir()) == []
    for name, array in outputs.items():
        found = kept[0][name]
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    np.testing.assert_array_equal(kept[1]["floats"], [7])
    with pytest.raises(ValueError, match="read-only"):
        kept[1]["floats"][0] = 1


def test_more_outputs_are_kept_than_files_may_be_open(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        kept = Spool(tmp_path, ({"y": np.array([number])} for number in range(1000)))
        assert [int(one["y"][0]) for one in kept] == list(range(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_drift_is_summarised_over_the_rows_of_all_feeds() -> None:
    feeds = [{"x": np.ones((rows, 4), np.float32)} for rows in (1, 2)]
    expected = list(map(Computed(lambda x: x).run, feeds))
    found = list(map(Computed(lambda x: x * np.float32(1.5)).run, feeds))
    summary = summarise(drifts(expected, found, OUT, 0, {}))["y"]
    assert summary.samples == 3
    assert summary.judged("relative_l2") == pytest.approx(0.5)
    assert summarise(drifts(expected, found, OUT, None, {}))["y"].samples == 2


def test_samples_of_a_series_are_not_compared_with_their_neighbours() -> None:
    """Neighbours in a series differ little, and slices would seem to vary by that."""
    spec = (TensorSpec("y", "float32", ("n", 3)),)
    series = np.linspace(0, 1, 300, dtype=np.float32)[:, None] * np.ones(3, np.float32)
    for feeds in ([{"y": series}], [{"y": row[None]} for row in series]):
        (scale,) = slice_scales(feeds, spec, 0)["y"]
        np.testing.assert_allclose(scale, series.var(axis=0), rtol=0.3)


def test_a_reference_that_gives_nan_is_rejected_and_the_sample_is_named() -> None:
    feeds = tuple({"x": np.full((1, 4), value, np.float32)} for value in (1, np.inf, np.nan))
    with pytest.raises(SamplesError, match=r"gives NaN for sample 2 of the test \(output 'y', 4 of 4 values\)"):
        spool(Computed(lambda x: x).run, Samples(feeds, "the test"), None)


@pytest.mark.long
def test_outputs_of_a_large_vocabulary_are_never_in_memory_all_at_once() -> None:
    """60 samples of 32 tokens over 20,000 words are 154 MB for the reference, and as much again for the profile."""
    peak, one = map(int, measured_alone(LARGE_VOCABULARY).split())
    assert peak < 12 * one, f"{peak / one:.1f} answers at the peak"


def model_of(proto: ModelProto) -> ir.Model:
    return ir.serde.deserialize_model(shape_inference.infer_shapes(proto))


@pytest.mark.parametrize("spread", ["normal", "lognormal", "uniform"])
def test_the_noise_of_rounding_is_the_derived_constant(spread: str) -> None:
    """It holds within 1 dB for every distribution, because only the spread of the significands matters."""
    values = getattr(np.random.default_rng(0), spread)(size=1 << 18).astype(np.float32)
    added = np.square(to_fp32(to_bf16(values)).astype(np.float64) - values).sum() / np.square(values, dtype=float).sum()
    assert abs(10 * math.log10(added / ROUNDING)) < 1


WEIGHT = Rounded(frozenset({"w"}), frozenset())
READING = Rounded(frozenset({"w"}), frozenset(), frozenset({"first", "second"}))
SCORES = Rounded(frozenset(), frozenset(), frozenset({"scores"}))
NODES = Rounded(frozenset({"w"}), frozenset({"first", "relu"}))


@pytest.mark.parametrize(
    ("last", "rounded", "means", "expected"),
    [
        ("y = Relu (b)", WEIGHT, {}, {"a": 1, "b": 2, "y": 2}),  # that of products adds up, activations pass it on
        ("y = Add (a, b)", WEIGHT, {"a": 3, "b": 1}, {"y": 1.25}),  # terms weigh by their power
        ("y = Sub (a, b)", WEIGHT, {"a": 1, "b": 1}, {"y": 1.5}),  # a difference is not expected to cancel
        ("y = Mul (a, a)", WEIGHT, {}, {"y": 4}),  # a square doubles the error
        ("y = Relu (b)", READING, {}, {"a": 2, "b": 4}),  # activations are rounded once, results are not
        ("[scores] y = MatMul (a, b)", SCORES, {}, {"y": 2}),  # both computed matrices are rounded
        ("[relu] y = Relu (a)", NODES, {}, {"a": 3, "y": 3}),  # a bf16 node rounds input and result; Relu adds none
    ],
)
def test_the_predicted_noise_in_units_of_one_rounding(
    last: str, rounded: Rounded, means: dict[str, float], expected: dict[str, float]
) -> None:
    text = f"(float[n, 4] x) => (float[n, 4] y) {{ [first] a = MatMul (x, w) [second] b = MatMul (a, w) {last} }}"
    graph = model_of(graphs.parsed(text, w=graphs.values(4, 4))).graph
    found = predicted(graph, rounded, lambda value: means.get(value.name or "", math.nan))
    ratios = {value.name: ratio / ROUNDING for value, ratio in found.items()}
    assert {name: ratios[name] for name in expected} == pytest.approx(expected)


def test_a_mask_beyond_bf16_is_left_out_and_an_overflow_is_not() -> None:
    power = Power()
    lowest = np.finfo(np.float32).min
    power.add(np.array([1.0, lowest], np.float32), np.array([1.5, -3.3895313892515355e38], np.float32))
    assert (power.count, power.ratio) == (1, 0.25)
    power.add(np.array([3e38], np.float32), np.array([math.inf], np.float32))
    assert power.ratio == math.inf
    zero = Power()
    zero.add(np.zeros(2, np.float32), np.ones(2, np.float32))
    assert zero.ratio == math.inf


CASES = int(os.environ.get("BF16KIT_JUDGE_CASES", "28"))  # half of them destroyed, two of each kind; more in .ci/weekly


def _options(source: Path, target: Path) -> Options:
    return Options(
        source=source, target=parse_target(target), formats=("onnx",), profiles=("cpu",), search=False, report=False
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_a_destroyed_slice_is_rejected_and_the_slice_is_named(kind: str, tmp_path: Path) -> None:
    for seed in range(KINDS.index(kind), CASES // 2, len(KINDS)):
        case = write(tmp_path / f"{seed}.onnx", seed, destroyed=True)
        with pytest.raises(BudgetExceeded) as refused:
            convert(_options(case.path, tmp_path / "repository" / f"m{seed}" / "1"))
        assert f"slice_error of index {case.index} of axis {case.axis} is" in str(refused.value), case


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_model_with_no_destroyed_slice_is_published(kind: str, tmp_path: Path) -> None:
    for seed in range(KINDS.index(kind), CASES // 2, len(KINDS)):
        case = write(tmp_path / f"{seed}.onnx", seed, destroyed=False)
        manifest = convert(_options(case.path, tmp_path / "repository" / f"m{seed}" / "1")).artifact.manifest
        assert manifest.drift["cpu"].outputs["y"]["slice_error"]["worst"] < 0.1, case


@pytest.mark.parametrize(
    ("rows", "ratio"),
    [
        ([[1e4, 1e4 + 2], [5e3, 5e3 + 2]], 3.0),  # beside a difference of 2, which is 1 from the mean
        ([[1e4, 1e4 + 2], [math.inf, 1]], 3.0),
        ([[7, 7], [8, 8]], None),
        ([[7], [8]], None),
        (np.zeros((0, 4)), None),
        (np.zeros((4, 0)), None),
    ],
)
def test_an_error_is_compared_with_what_the_values_of_a_sample_differ_by(rows: Any, ratio: float | None) -> None:
    reference, spec = np.array(rows, np.float32), TensorSpec("y", "float32", ("n", "m"))
    found = [{"y": compare(reference, reference + 3, spec, 0)}]
    lost = lost_in_samples(found, levels_of(Expected([{}], [{"y": reference}], {}, given=1), 0))
    assert lost == ({} if ratio is None else {"y": pytest.approx(ratio, rel=1e-3)})
