from __future__ import annotations

from pathlib import Path

from small import publish_small

from bf16kit.artifact.manifest import DriftEntry
from bf16kit.drift.verdicts import drift_rows


def test_the_drift_table_shows_the_judged_value_and_whether_it_is_within_budget(tmp_path: Path) -> None:
    """It shows the mean, the worst of max_abs and the total of nonfinite. A value equal to its bound is within."""
    manifest = publish_small(tmp_path / "m" / "1").manifest
    stats = {
        "relative_l2": {"mean": 0.02, "p50": 0.0, "p99": 0.0, "worst": 0.5},
        "max_abs": {"mean": 0.1, "p50": 0.0, "p99": 0.0, "worst": 3.0},
        "top1_agreement": {"mean": 0.99},
        "nonfinite": {"total": 2.0},
    }
    measured = manifest.model_copy(
        update={
            "budget": {"relative_l2": 0.02, "top1_agreement": 0.99, "nonfinite": 0.0},
            "drift": {"cpu": DriftEntry(samples=4, source="s", outputs={"y": stats})},
        }
    )
    rows = {row.metric: (row.measured, row.worst, row.bound, row.within) for row in drift_rows(measured)}
    assert rows == {
        "relative_l2": (0.02, 0.5, 0.02, True),
        "max_abs": (3.0, 3.0, None, True),
        "top1_agreement": (0.99, None, 0.99, True),
        "nonfinite": (2.0, None, 0.0, False),
    }
