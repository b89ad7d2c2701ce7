"""Drift over samples, and the batch axis: declared only if two samples give the same outputs together as apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from peaks import measured_alone

from bf16kit.errors import RuntimeFailure, SamplesError
from bf16kit.runtime import Array, RuntimeInfo
from bf16kit.tensors import TensorSpec
from converter.proof.measure import batch_axis, drifts, run_all, spool, summarise, with_batch_dimension
from converter.proof.samples import Samples

IN = (TensorSpec("x", "float32", ("n", 4)),)
OUT = (TensorSpec("y", "float32", ("y_0", 4)),)
PAIR = [{"x": np.arange(8, dtype=np.float32).reshape(2, 4)}]


LARGE_VOCABULARY = """
import numpy as np
from bf16kit.tensors import TensorSpec
from converter.proof import measure
from converter.proof.samples import Samples
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
measure.drifts([{"y": np.ones((1, 4), np.float32)}], [{"y": np.ones((1, 4), np.float32)}], [spec], 0)
samples = Samples(tuple({"x": np.array([seed])} for seed in range(60)), "the test")
before = anonymous()
with peak_anonymous() as peak:
    expected = measure.spool(Random(0), samples, None)
    found = measure.drifts(expected, measure.run_all(Random(1e-3), samples.feeds), [spec], 0)
assert measure.summarise(found)["y"].samples == 60
print(peak.bytes - before, one)
"""


class Computed:
    """A runtime that computes ``y`` from ``x`` with a function."""

    def __init__(self, function: Callable[[Array], Array]) -> None:
        self._function = function
        self.inputs, self.outputs = IN, OUT
        self.info = RuntimeInfo("numpy", "cpu", "reference", "fp32", "fp32")

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, seconds: float | None = None
    ) -> dict[str, Array]:
        return {"y": self._function(feeds["x"])}

    def close(self) -> None:
        """Nothing to free."""


def _only_singles(x: Array) -> Array:
    if len(x) != 1:
        raise RuntimeFailure("a Reshape with a fixed size")
    return x


@pytest.mark.parametrize(
    ("function", "axis"),
    [
        (lambda x: x * 2, 0),
        (lambda x: x * np.float32(1 + 1e-6 * len(x)), 0),  # sums in another order: fp32 noise
        (lambda x: x - x.mean(0), None),  # mixes samples
        (lambda x: x * len(x), None),
        (lambda x: x[:1], None),  # gives one row only
        (lambda x: np.where(len(x) > 1, np.nan, x), None),
        (_only_singles, None),
    ],
    ids=["apart", "noise", "mean", "count", "first", "nan", "fixed"],
)
def test_the_batch_axis_is_found_by_running_two_samples_together(
    function: Callable[[Array], Array], axis: int | None
) -> None:
    assert batch_axis(Computed(function), IN, OUT, PAIR) == axis


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
    def row(*values: float) -> dict[str, Array]:
        return {"x": np.array([values], np.float32)}

    feeds = [row(1, 2), row(1, 2, 3), row(4, 5, 6)]
    assert batch_axis(Computed(lambda x: x * 2), IN, OUT, feeds) == 0
    assert batch_axis(Computed(lambda x: x * 2), IN, OUT, feeds[:2]) is None  # no pair: nothing was compared


def test_a_proved_batch_axis_has_one_name_in_inputs_and_outputs() -> None:
    assert with_batch_dimension(OUT, "n") == (TensorSpec("y", "float32", ("n", 4)),)


def test_drift_is_summarised_over_the_rows_of_all_feeds() -> None:
    feeds = [{"x": np.ones((rows, 4), np.float32)} for rows in (1, 2)]
    expected = list(run_all(Computed(lambda x: x), feeds))
    found = list(run_all(Computed(lambda x: x * np.float32(1.5)), feeds))
    summary = summarise(drifts(expected, found, OUT, 0))["y"]
    assert summary.samples == 3
    assert summary.judged("relative_l2") == pytest.approx(0.5)
    assert summarise(drifts(expected, found, OUT, None))["y"].samples == 2


def test_a_sample_without_an_output_is_an_error() -> None:
    feeds = [{"x": np.ones((1, 4), np.float32)}] * 2
    expected = list(run_all(Computed(lambda x: x), feeds))
    with pytest.raises(ValueError, match="1 answers to 2 samples"):
        drifts(expected, expected[:1], OUT, 0)


def test_a_reference_that_gives_nan_is_rejected_and_the_sample_is_named() -> None:
    feeds = tuple({"x": np.full((1, 4), value, np.float32)} for value in (1, np.inf, np.nan))
    with pytest.raises(SamplesError, match=r"gives NaN for sample 2 of the test \(output 'y', 4 of 4 values\)"):
        spool(Computed(lambda x: x), Samples(feeds, "the test"), None)


@pytest.mark.long
def test_outputs_of_a_large_vocabulary_are_never_in_memory_all_at_once() -> None:
    """60 samples of 32 tokens over 20,000 words are 154 MB for the reference, and as much again for the profile."""
    peak, one = map(int, measured_alone(LARGE_VOCABULARY).split())
    assert peak < 12 * one, f"{peak / one:.1f} answers at the peak"
