"""Drift against its budget: the verdict on each profile."""

from __future__ import annotations

import math

import pytest
import reported

from bf16kit.artifact.manifest import SINCE_SLICES, DriftEntry, Manifest
from bf16kit.drift.verdicts import format_budget_ratio
from converter.report.figures import Figures


def _figures(manifest: Manifest) -> list[str]:
    found = Figures(manifest, manifest.files)
    return [found.headline, *(verdict.sentence for verdict in found.verdicts)]


def test_within_budget_is_one_sentence_with_the_bound_that_is_nearest() -> None:
    headline, cpu, cuda = _figures(reported.manifest())
    assert headline == "cpu and cuda keep within the drift budget."
    assert cpu.startswith("cpu is within budget: relative_l2.p99 of logits is 0.0028, at most 0.02 is allowed (14% of")
    assert "; measured on 128 samples of calibration.npz; judged by the older measure" in cpu
    assert "emulated on the CPU, on 128 samples" in cuda


def test_over_budget_names_the_profile_and_the_bound() -> None:
    headline, cpu, cuda = _figures(reported.manifest(over=True))
    assert headline == "cuda is over the drift budget."
    assert "within" in cpu
    assert cuda.startswith("cuda is over budget: relative_l2.p99 of logits is")


def test_a_lower_bound_is_worded_as_one_and_what_was_not_judged_is_said() -> None:
    stats = {"top1_agreement": {"mean": 0.5, "rows": 20.0}, "slice_error": {"worst": 0.1, "judged": 3.0, "slices": 5.0}}
    entry = DriftEntry(samples=1, source="s", outputs={"y": stats})
    manifest = reported.manifest().amended(drift={"cpu": entry}, schema_version=SINCE_SLICES)
    headline, cpu = _figures(manifest)
    assert headline == "cpu is over the drift budget."
    assert cpu == (
        "cpu is over budget: top1_agreement of y is 0.5, at least 0.99 is required (50 × the budget);"
        " measured on 1 sample of s; not judged: 2 of 5 slices of y, zero, at fp32 noise or in too few samples;"
        " top1_agreement of y was judged on 20 rows, its bound needs 100"
    )


def test_an_output_without_any_slice_judged_is_named() -> None:
    manifest = reported.manifest()
    output = next(each for each in manifest.outputs if each.dtype == "float32")
    entry = DriftEntry(samples=1, source="s", outputs={output.name: {"nonfinite": {"total": 0.0}}})
    amended = manifest.amended(drift={"cpu": entry}).model_copy(update={"schema_version": SINCE_SLICES})
    sentence = _figures(amended)[1]
    assert f"not judged: any slice of {output.name}, zero, at fp32 noise or in too few samples" in sentence


def test_quantiles_that_the_budget_bounds_are_listed_below_their_metric() -> None:
    rows = [row.metric for row in Figures(reported.manifest(), {}).drift if row.profile == "cpu"]
    assert rows[:3] == ["relative_l2", "relative_l2.p99", "cosine_distance"]


def test_without_a_bound_drift_is_within_and_a_lack_of_measurements_is_reported() -> None:
    headline, cpu, _ = _figures(reported.manifest().amended(budget={}))
    assert headline == "cpu and cuda keep within the drift budget."
    assert "nothing is bounded" in cpu
    assert _figures(reported.manifest().amended(drift={})) == ["No drift was measured."]


@pytest.mark.parametrize(
    ("used", "said"),
    [
        (0.0, "0%"),
        (0.001, "< 1%"),
        (0.5, "50%"),
        (1.97, "197%"),
        (40.0, "40 ×"),
        (1615.3, "1,615 ×"),
        (math.inf, "∞ ×"),
    ],
)
def test_shares_of_a_budget(used: float, said: str) -> None:
    assert format_budget_ratio(used) == said
