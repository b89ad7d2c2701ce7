import itertools
import json
import math
import time
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest

from bf16kit.artifact.evidence import Evidence
from bf16kit.drift.metrics import Budget, compare
from bf16kit.messages.errors import NotFound
from bf16kit.numerics.tensors import Array, TensorSpec
from bf16kit.service.drift import breachevidence
from bf16kit.service.drift.breachevidence import EvidenceRecorder
from bf16kit.service.drift.contract import Cause, DriftVerdict, State
from bf16kit.service.drift.sampler import Sample
from bf16kit.service.peers.channel import from_json

Y, Z = TensorSpec("y", "float32", ("batch", 8)), TensorSpec("z", "float32", ("batch", 4), "logits")
BUDGET = Budget({"relative_l2": 0.01, "top1_agreement": 0.99, "nonfinite": 0.0})
VERDICT = DriftVerdict("m", 1, output="y", metric="relative_l2", at=100.0)
FILES = {"cpu.onnx": "ab" * 32}
COUNT = itertools.count()


class Breaches(EvidenceRecorder):
    """A recorder of samples with the drift and the state that a test gives."""

    def __init__(self, axis: int | None = 0, *specs: TensorSpec, compared_axis: int | None = 0) -> None:
        super().__init__(axis, BUDGET, FILES)
        self._specs, self._axis = specs or (Y,), compared_axis

    def put(self, state: State, *drifts: float, axis: int = 0, cause: Cause = "none") -> Sample:
        """Record a request with one row per relative_l2, whose inputs differ from all others."""
        reference = np.ones((len(drifts), 8), np.float32)
        served = reference * (1 + np.array(drifts, np.float32))[:, None]
        x = np.array([[next(COUNT)] * 2 for _ in drifts], np.float32)
        x, served, reference = (np.moveaxis(array, 0, axis) for array in (x, served, reference))
        sample = Sample({"x": x}, {"y": served}, len(drifts), 0, 0.5, "bf16", "cpu")
        self.judge({"y": reference}, sample, replace(VERDICT, state=state, cause=cause))
        return sample

    def judge(self, expected: dict[str, Array], sample: Sample, verdict: DriftVerdict) -> None:
        drifts = {s.name: compare(expected[s.name], sample.outputs[s.name], s, self._axis).rows for s in self._specs}
        self.record(expected, sample, drifts, verdict)

    def kept(self) -> Evidence:
        return self.evidence("model 'm' version 1")

    def kept_drift(self) -> float | None:
        """Return the relative_l2 of the row that is kept; None without one."""
        try:
            return float(self.kept().header.drift["y"]["relative_l2"])
        except NotFound:
            return None


@pytest.mark.parametrize(("state", "cause"), [("over", "rounding"), ("unknown", "broken")])
def test_only_the_worst_row_of_a_breach_is_kept_in_memory_of_its_own(state: State, cause: Cause) -> None:
    recorder = Breaches()
    sample = recorder.put(state, 0.02, 0.5, 0.03, cause=cause)
    x, y = sample.feeds["x"][1:2].copy(), sample.outputs["y"][1:2].copy()
    for array in (sample.feeds["x"], sample.outputs["y"]):
        array[:] = -1
    found = recorder.kept()
    np.testing.assert_array_equal(found.feeds["x"], x)
    np.testing.assert_array_equal(found.served["y"], y)
    assert found.feeds["x"].base is None
    assert (found.reference["y"] == 1).all()
    assert recorder.kept_drift() == pytest.approx(0.5)
    header = Evidence.loads(found.dumps(), "e").header
    assert (header.model, header.version, header.rows, header.of_rows, header.batch_axis) == ("m", 1, 1, 3, 0)
    assert (header.profile, header.precision) == ("cpu", "bf16")
    assert abs(datetime.fromisoformat(header.at).timestamp() - time.time()) < 60
    assert (header.files, header.budget) == (FILES, BUDGET.as_dict())
    verdict = from_json(DriftVerdict, json.loads(json.dumps(header.verdict)))
    assert verdict == replace(VERDICT, state=state, cause=cause), "its infinite end included"
    assert {"bf16kit", "numpy", "python"} <= header.versions.keys()


@pytest.mark.parametrize(
    ("axis", "compared", "whole"),
    [
        (1, TensorSpec("y", "float32", (8, "batch")), False),
        (None, TensorSpec("y", "float32", (2, 8)), True),
        (0, None, True),  # an output without rows: the evidence would hold one row of the inputs and the outputs of all
    ],
)
def test_one_row_is_kept_if_rows_can_be_separated(axis: int | None, compared: TensorSpec | None, whole: bool) -> None:
    recorder = Breaches(axis, compared or Y, compared_axis=None if compared is None else axis)
    sample = recorder.put("over", 0.02, 0.5, axis=axis or 0)
    found = recorder.kept()
    expected = sample.feeds["x"] if whole else sample.feeds["x"][:, 1:2]
    np.testing.assert_array_equal(found.feeds["x"], expected)
    assert (found.header.rows, found.header.batch_axis) == (2 if whole else 1, axis)


def test_the_worst_row_of_the_newest_breach_is_kept() -> None:
    recorder = Breaches()
    steps: tuple[tuple[State, float, float | None], ...] = (
        ("unknown", 0.5, None),
        ("within", 0.5, None),
        ("over", 0.3, 0.3),
        ("over", 0.2, 0.3),
        ("over", 0.4, 0.4),
        ("within", 0.9, 0.4),
        ("over", math.inf, math.inf),
        ("within", 0.001, math.inf),
        ("over", 0.1, 0.1),
    )
    for state, drift, kept in steps:
        recorder.put(state, drift)
        assert recorder.kept_drift() == (kept and pytest.approx(kept))
    recorder.restart()
    assert recorder.kept_drift() == pytest.approx(0.1)
    recorder.put("over", 0.05)
    assert recorder.kept_drift() == pytest.approx(0.05), "another precision answers: this is another breach"


def test_the_row_is_the_worst_in_the_metric_that_the_verdict_names() -> None:
    """Another logit is the largest in that row, which is close to the reference in everything else."""
    recorder = Breaches(0, Y, Z)
    reference = {"y": np.ones((2, 8), np.float32), "z": np.array([[1, 2, 3, 4], [1, 2, 3, 3.01]], np.float32)}
    served = {"y": reference["y"] * np.array([[9], [1]], np.float32), "z": reference["z"].copy()}
    served["z"][1, 2] = 3.02
    x = np.array([[1], [2]], np.float32)
    over = replace(VERDICT, state="over", output="z", metric="top1_agreement")
    recorder.judge(reference, Sample({"x": x}, served, 2, 0, profile="cpu"), over)
    assert recorder.kept().feeds["x"].tolist() == [[2]]


def test_a_breach_with_too_large_rows_replaces_the_evidence_of_the_breach_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(breachevidence, "MAX_ROW_BYTES", 100)
    recorder = Breaches(None, compared_axis=None)
    with pytest.raises(NotFound, match="model 'm' version 1 has not been over its budget"):
        recorder.kept()
    steps: tuple[tuple[State, tuple[float, ...], float | None], ...] = (
        ("over", (0.9,), 0.9),
        ("over", (0.95, 0.95), 0.9),  # still the same breach
        ("within", (0.001, 0.001), 0.9),
        ("over", (0.5, 0.5), None),
    )
    for state, drifts, kept in steps:
        recorder.put(state, *drifts)
        assert recorder.kept_drift() == (kept and pytest.approx(kept))
    with pytest.raises(NotFound, match="the rows of its last breach have 144 bytes each; at most 100 are kept"):
        recorder.kept()
    recorder.put("over", 0.3)
    assert recorder.kept_drift() == pytest.approx(0.3)
