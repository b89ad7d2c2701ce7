"""Drift over samples."""

from __future__ import annotations

import resource
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from computed import OUT, Computed
from peaks import measured_alone

from bf16kit.messages.errors import SamplesError
from bf16kit.numerics.tensors import TensorSpec
from converter.verify.measure import Spool, drifts, slice_scales, spool, summarise
from converter.verify.samples import Samples

LARGE_VOCABULARY = """
import numpy as np
from bf16kit.numerics.tensors import TensorSpec
from converter.verify import measure
from converter.verify.samples import Samples
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
    expected = measure.spool(Random(0), samples, None)
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
        spool(Computed(lambda x: x), Samples(feeds, "the test"), None)


@pytest.mark.long
def test_outputs_of_a_large_vocabulary_are_never_in_memory_all_at_once() -> None:
    """60 samples of 32 tokens over 20,000 words are 154 MB for the reference, and as much again for the profile."""
    peak, one = map(int, measured_alone(LARGE_VOCABULARY).split())
    assert peak < 12 * one, f"{peak / one:.1f} answers at the peak"
