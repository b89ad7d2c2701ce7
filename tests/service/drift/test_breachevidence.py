from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from bench.drift.streams import Silent
from bf16kit.artifact.evidence import Evidence
from bf16kit.drift.metrics import Budget, compare
from bf16kit.messages.errors import NotFound
from bf16kit.numerics.tensors import Array, TensorSpec
from service.drift.breachevidence import HALF_LIFE, EvidenceRecorder
from service.drift.comparison import Comparison, DriftObserver, Drifts
from service.drift.sampler import Sample
from service.drift.verdict import STATES, Cause, DriftVerdict, State

Y, Z = TensorSpec("y", "float32", ("batch", 8)), TensorSpec("z", "float32", ("batch", 4), "logits")
BUDGET = Budget({"relative_l2": 0.01, "top1_agreement": 0.99, "nonfinite": 0.0})
FILES = {"cpu.onnx": "ab" * 32}
COUNT = itertools.count()


class Told:
    """Measures as a :class:`Comparison` does, and returns the verdict that a test sets."""

    def __init__(self, specs: tuple[TensorSpec, ...] = (Y,), axis: int | None = 0) -> None:
        self.specs, self.axis = specs, axis
        self.says = DriftVerdict.unknown("m", 1)
        self.restarted = 0

    def say(self, state: State, cause: Cause = "none", output: str = "y", metric: str = "relative_l2") -> None:
        self.says = replace(self.says, state=state, cause=cause, output=output, metric=metric)

    def observe(self, expected: Mapping[str, Array], sample: Sample, observer: DriftObserver) -> Drifts:
        return {
            spec.name: compare(expected[spec.name], sample.outputs[spec.name], spec, self.axis).rows
            for spec in self.specs
            if spec.name in sample.outputs
        }

    def verdict(self) -> DriftVerdict:
        return self.says

    def restart(self) -> None:
        self.restarted += 1


def asked(*drifts: float, axis: int = 0) -> tuple[dict[str, Array], Sample]:
    """Return the reference's outputs and a sample with one row per relative_l2; its inputs differ from all others."""
    reference = np.ones((len(drifts), 8), np.float32)
    served = reference * (1 + np.array(drifts, np.float32))[:, None]
    x = np.array([[next(COUNT)] * 2 for _ in drifts], np.float32)
    arrays = [np.moveaxis(array, 0, axis) for array in (x, served, reference)]
    sample = Sample({"x": arrays[0]}, {"y": arrays[1]}, len(drifts), 0, 0.5, "bf16", "cpu")
    return {"y": arrays[2]}, sample


def put(recorder: EvidenceRecorder, *drifts: float, axis: int = 0) -> Sample:
    expected, sample = asked(*drifts, axis=axis)
    recorder.observe(expected, sample, Silent())
    return sample


def kept(recorder: EvidenceRecorder) -> Evidence:
    return recorder.evidence(FILES)


def relative_l2(evidence: Evidence) -> float:
    return float(evidence.header.drift["y"]["relative_l2"])


@pytest.mark.parametrize(("state", "cause"), [("over", "rounding"), ("unknown", "broken")])
def test_only_the_worst_row_of_a_breach_is_kept(state: State, cause: Cause) -> None:
    told = Told()
    recorder = EvidenceRecorder(told, 0, BUDGET, clock=lambda: 1767225600.0)
    told.say(state, cause)
    sample = put(recorder, 0.02, 0.5, 0.03)
    found = kept(recorder)
    np.testing.assert_array_equal(found.feeds["x"], sample.feeds["x"][1:2])
    np.testing.assert_array_equal(found.served["y"], sample.outputs["y"][1:2])
    assert (found.reference["y"] == 1).all()
    header = found.header
    assert (header.model, header.version, header.rows, header.of_rows, header.batch_axis) == ("m", 1, 1, 3, 0)
    assert (header.profile, header.precision, header.at) == ("cpu", "bf16", "2026-01-01T00:00:00+00:00")
    assert (header.files, header.budget) == (FILES, BUDGET.as_dict())
    assert (header.verdict["state"], header.verdict["cause"]) == (state, cause)
    assert relative_l2(found) == pytest.approx(0.5)
    assert {"bf16kit", "numpy", "python"} <= header.versions.keys()
    assert Evidence.loads(found.dumps(), "e").header.model == "m", "it can be written"


def test_the_row_is_taken_along_the_models_batch_axis() -> None:
    told = Told((TensorSpec("y", "float32", (8, "batch")),), 1)
    recorder = EvidenceRecorder(told, 1, BUDGET)
    told.say("over")
    sample = put(recorder, 0.02, 0.5, axis=1)
    np.testing.assert_array_equal(kept(recorder).feeds["x"], sample.feeds["x"][:, 1:2])


def test_without_a_batch_axis_the_sample_is_kept_whole() -> None:
    told = Told((TensorSpec("y", "float32", (2, 8)),), None)
    recorder = EvidenceRecorder(told, None, BUDGET)
    told.say("over")
    sample = put(recorder, 0.5, 0.02)
    found = kept(recorder)
    np.testing.assert_array_equal(found.feeds["x"], sample.feeds["x"])
    assert (found.header.rows, found.header.batch_axis) == (2, None)


def test_outputs_without_rows_are_not_split() -> None:
    """Otherwise the evidence would hold one row of the inputs and the outputs of all rows."""
    told = Told((Y,), None)
    recorder = EvidenceRecorder(told, 0, BUDGET)
    told.say("over")
    sample = put(recorder, 0.5, 0.02)
    np.testing.assert_array_equal(kept(recorder).feeds["x"], sample.feeds["x"])


def test_nothing_is_kept_without_a_breach() -> None:
    told = Told()
    recorder = EvidenceRecorder(told, 0, BUDGET)
    for state in STATES[:2]:
        told.say(state)
        put(recorder, 0.5)
        with pytest.raises(NotFound, match="model 'm' version 1 has not been over its budget"):
            kept(recorder)


def test_a_row_from_before_a_breach_is_kept_if_it_was_worse_than_the_breaching_row() -> None:
    told = Told()
    recorder = EvidenceRecorder(told, 0, BUDGET)
    worst = put(recorder, 0.9)
    put(recorder, 0.2)
    told.say("over")
    put(recorder, 0.3)
    np.testing.assert_array_equal(kept(recorder).feeds["x"], worst.feeds["x"])


def test_a_row_from_long_before_a_breach_is_not_its_evidence() -> None:
    told = Told()
    recorder = EvidenceRecorder(told, 0, BUDGET)
    put(recorder, 0.9)
    for _ in range(2 * HALF_LIFE):
        put(recorder, 0.001)
    later = put(recorder, 0.4)
    for _ in range(HALF_LIFE):
        put(recorder, 0.001)
    told.say("over")
    put(recorder, 0.05)
    np.testing.assert_array_equal(kept(recorder).feeds["x"], later.feeds["x"])


def test_a_row_that_is_not_finite_is_forgotten_too() -> None:
    told = Told()
    recorder = EvidenceRecorder(told, 0, BUDGET)
    put(recorder, math.nan)
    for _ in range(5 * HALF_LIFE):
        put(recorder, 0.001)
    told.say("over")
    put(recorder, 0.05)
    assert relative_l2(kept(recorder)) == pytest.approx(0.05)


def test_during_a_breach_only_a_worse_row_replaces_the_kept_row() -> None:
    told = Told()
    recorder = EvidenceRecorder(told, 0, BUDGET)
    told.say("over")
    put(recorder, 0.3)
    put(recorder, 0.2)
    assert relative_l2(kept(recorder)) == pytest.approx(0.3)
    put(recorder, 0.4)
    assert relative_l2(kept(recorder)) == pytest.approx(0.4)


def test_the_evidence_of_a_breach_is_kept_until_the_next_breach() -> None:
    told = Told()
    recorder = EvidenceRecorder(told, 0, BUDGET)
    told.say("over")
    put(recorder, 0.9)
    told.say("within")
    put(recorder, 0.001)
    assert relative_l2(kept(recorder)) == pytest.approx(0.9)
    told.say("over")
    put(recorder, 0.1)
    assert relative_l2(kept(recorder)) == pytest.approx(0.1)


def test_the_row_is_the_worst_in_the_metric_that_the_verdict_names() -> None:
    """Another logit is the largest in that row, which is close to the reference in everything else."""
    told = Told((Y, Z))
    recorder = EvidenceRecorder(told, 0, BUDGET)
    told.say("over", output="z", metric="top1_agreement")
    reference = {"y": np.ones((2, 8), np.float32), "z": np.array([[1, 2, 3, 4], [1, 2, 3, 3.01]], np.float32)}
    served = {"y": reference["y"] * np.array([[9], [1]], np.float32), "z": reference["z"].copy()}
    served["z"][1, 2] = 3.02
    x = np.array([[1], [2]], np.float32)
    recorder.observe(reference, Sample({"x": x}, served, 2, 0, profile="cpu"), Silent())
    assert kept(recorder).feeds["x"].tolist() == [[2]]


def test_the_evidence_has_its_own_memory() -> None:
    told = Told()
    recorder = EvidenceRecorder(told, 0, BUDGET)
    told.say("over")
    sample = put(recorder, 0.5, 0.1)
    before = float(kept(recorder).feeds["x"][0, 0])
    sample.feeds["x"][:] = -1
    assert kept(recorder).feeds["x"][0, 0] == before
    assert kept(recorder).feeds["x"].base is None


def test_a_row_over_the_size_limit_is_not_kept_and_the_error_says_so() -> None:
    told = Told()
    recorder = EvidenceRecorder(told, 0, BUDGET, max_bytes=71)
    told.say("over")
    put(recorder, 0.5)
    with pytest.raises(NotFound, match="have 72 bytes each; at most 71 are kept"):
        kept(recorder)


def test_rows_that_are_too_large_are_no_breach_by_themselves() -> None:
    told = Told()
    recorder = EvidenceRecorder(told, 0, BUDGET, max_bytes=71)
    told.say("within")
    put(recorder, 0.001)
    with pytest.raises(NotFound, match="model 'm' version 1 has not been over its budget"):
        kept(recorder)


def test_a_breach_with_too_large_rows_replaces_the_evidence_of_the_breach_before() -> None:
    told = Told((Y,), None)
    recorder = EvidenceRecorder(told, None, BUDGET, max_bytes=100)
    steps: tuple[tuple[State, tuple[float, ...], float | None], ...] = (
        ("over", (0.9,), 0.9),
        ("over", (0.95, 0.95), 0.9),  # still the same breach
        ("within", (0.001, 0.001), 0.9),
        ("over", (0.5, 0.5), None),
        ("over", (0.3,), 0.3),
        ("within", (0.8,), 0.3),
        ("over", (0.5, 0.5), 0.8),
    )
    for state, drifts, shown in steps:
        told.say(state)
        put(recorder, *drifts)
        if shown is None:
            with pytest.raises(NotFound, match="the rows of its last breach have 144 bytes each; at most 100 are kept"):
                kept(recorder)
        else:
            assert relative_l2(kept(recorder)) == pytest.approx(shown)


def test_a_restart_is_passed_on_and_the_next_breach_is_a_new_one() -> None:
    told = Told()
    recorder = EvidenceRecorder(told, 0, BUDGET)
    told.say("over")
    put(recorder, 0.9)
    recorder.restart()
    assert told.restarted == 1
    assert relative_l2(kept(recorder)) == pytest.approx(0.9)
    put(recorder, 0.2)
    assert relative_l2(kept(recorder)) == pytest.approx(0.2), "what answers is another: this is another breach"


def test_a_real_comparison_that_goes_over_budget_leaves_evidence() -> None:
    recorder = EvidenceRecorder(Comparison([Y], 0, BUDGET, model="m", version=1), 0, BUDGET)
    random = np.random.default_rng(0)
    for _ in range(100):
        put(recorder, *(0.004 * (1 + random.random(4))))
    assert recorder.verdict().state == "within"
    for _ in range(100):
        put(recorder, *(0.3 * (1 + random.random(4))))
        if recorder.verdict().state == "over":
            break
    assert recorder.verdict().state == "over"
    assert relative_l2(kept(recorder)) > 0.3
