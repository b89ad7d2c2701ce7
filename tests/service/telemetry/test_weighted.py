from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from service.telemetry.weighted import WeightedHistogram

BOUNDS = (0.5, 1.0, 2.0)


def weighted(registry: CollectorRegistry) -> WeightedHistogram:
    return WeightedHistogram("h", "Text.", ("model", "output"), registry=registry, buckets=BOUNDS)


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(st.one_of(st.floats(0, 4), st.sampled_from(BOUNDS)), max_size=20))
def test_with_weights_of_one_it_equals_the_librarys_histogram(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = weighted(ours).labels("m", "y")
    plain = Histogram("h", "Text.", ("model", "output"), registry=theirs, buckets=BOUNDS).labels("m", "y")
    for value in values:
        mine.observe(value, 1.0)
        plain.observe(value)
    assert lines(ours) == lines(theirs)


@given(st.lists(st.tuples(st.floats(0, 4), st.floats(0.01, 1e4)), min_size=1, max_size=30))
def test_counts_are_integers_never_fall_and_are_within_half_a_row(
    seen: list[tuple[float, float]],
) -> None:
    registry = CollectorRegistry()
    series = weighted(registry).labels("m", "y")
    before = [0.0] * (len(BOUNDS) + 1)
    for at, (value, weight) in enumerate(seen):
        series.observe(value, weight)
        now = [count for _, count in series.snapshot()[0]]
        assert all(count == int(count) and count >= was for count, was in zip(now, before, strict=True))
        for count, bound in zip(now, (*BOUNDS, math.inf), strict=True):
            assert abs(count - math.fsum(w for v, w in seen[: at + 1] if v <= bound)) < 0.5 + 1e-6
        before = now
    assert series.snapshot()[1] == pytest.approx(math.fsum(v * w for v, w in seen))


def test_series_are_removed_by_label_and_the_others_stay() -> None:
    registry = CollectorRegistry()
    histogram = weighted(registry)
    for model in ("stays", "goes"):
        for output in ("y", "z"):
            histogram.labels(model, output).observe(1.0, 3.0)
    histogram.remove_by_labels({"model": "goes"})
    text = "\n".join(lines(registry))
    assert "goes" not in text
    assert 'h_count{model="stays",output="z"} 3.0' in text


def test_the_registry_knows_the_names_of_its_samples() -> None:
    registry = CollectorRegistry()
    weighted(registry).labels("m", "y").observe(0.5, 2.0)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        weighted(registry)
    found = registry.restricted_registry(["h_count"]).collect()
    assert [sample.value for family in found for sample in family.samples] == [2.0]


def test_too_few_label_values_raise_value_error() -> None:
    with pytest.raises(ValueError, match=r"\('model', 'output'\)"):
        weighted(CollectorRegistry()).labels("m")
