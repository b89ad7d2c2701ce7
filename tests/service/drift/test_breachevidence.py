from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
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


@pytest.mark.parametrize(
    ("axis", "compared", "whole"),
    [
        (1, TensorSpec("y", "float32", (8, "batch")), False),
        (None, TensorSpec("y", "float32", (2, 8)), True),
        (0, None, True),  # an output without rows: the evidence would hold one row of the inputs and the outputs of all
    ],
)
def test_one_row_is_kept_if_rows_can_be_separated(axis: int | None, compared: TensorSpec | None, whole: bool) -> None:
    told = Told((compared or Y,), None if compared is None else axis)
    recorder = EvidenceRecorder(told, axis, BUDGET)
    told.say("over")
    sample = put(recorder, 0.02, 0.5, axis=axis or 0)
    found = kept(recorder)
    expected = sample.feeds["x"] if whole else sample.feeds["x"][:, 1:2]
    np.testing.assert_array_equal(found.feeds["x"], expected)
    assert (found.header.rows, found.header.batch_axis) == (2 if whole else 1, axis)


def test_nothing_is_kept_without_a_breach() -> None:
    told = Told()
    recorder = EvidenceRecorder(told, 0, BUDGET)
    for state in STATES[:2]:
        told.say(state)
        put(recorder, 0.5)
        with pytest.raises(NotFound, match="model 'm' version 1 has not been over its budget"):
            kept(recorder)


Step = tuple[
    State, float, int, float | None
]  # the state, a row's drift, how often it is sent, the drift of what is kept


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([("within", 0.9, 1, None), ("within", 0.2, 1, None), ("over", 0.3, 1, 0.9)], id="worse before it"),
        pytest.param(
            [
                ("within", 0.9, 1, None),
                ("within", 0.001, 2 * HALF_LIFE, None),
                ("within", 0.4, 1, None),
                ("within", 0.001, HALF_LIFE, None),
                ("over", 0.05, 1, 0.4),
            ],
            id="long before it",
        ),
        pytest.param(
            [("within", math.nan, 1, None), ("within", 0.001, 5 * HALF_LIFE, None), ("over", 0.05, 1, 0.05)],
            id="not finite, very long before it",
        ),
        pytest.param([("over", 0.3, 1, 0.3), ("over", 0.2, 1, 0.3), ("over", 0.4, 1, 0.4)], id="during it"),
        pytest.param([("over", 0.9, 1, 0.9), ("within", 0.001, 1, 0.9), ("over", 0.1, 1, 0.1)], id="the next one"),
    ],
)
def test_the_worst_recent_row_of_the_newest_breach_is_kept(steps: Sequence[Step]) -> None:
    told = Told()
    recorder = EvidenceRecorder(told, 0, BUDGET)
    for state, drift, times, shown in steps:
        told.say(state)
        for _ in range(times):
            put(recorder, drift)
        if shown is not None:
            assert relative_l2(kept(recorder)) == pytest.approx(shown)


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


def test_a_breach_with_too_large_rows_replaces_the_evidence_of_the_breach_before() -> None:
    told = Told((Y,), None)
    recorder = EvidenceRecorder(told, None, BUDGET, max_bytes=100)
    steps: tuple[tuple[State, tuple[float, ...], float | None], ...] = (
        ("within", (0.001, 0.001), None),
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
            too_large = "the rows of its last breach have 144 bytes each; at most 100 are kept"
            with pytest.raises(NotFound, match=too_large if told.says.state == "over" else "has not been over its bud"):
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
