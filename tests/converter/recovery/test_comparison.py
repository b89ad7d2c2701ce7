"""Whether the recovered model does worse in bf16 than the original."""

from __future__ import annotations

from bf16kit.artifact.recoveryentries import AccuracyEntry, RecoveredDrift
from converter.recovery.comparison import Comparison, bf16_after, bf16_before


def _row(profile: str, before: float | None, after: float, metric: str = "relative_l2") -> RecoveredDrift:
    return RecoveredDrift(profile=profile, output="y", metric=metric, before=before, after=after, own=0.0)


def _right(profile: str, before: int, after: int) -> list[AccuracyEntry]:
    return [
        AccuracyEntry(model=bf16_before(profile), correct=before, rows=100),
        AccuracyEntry(model=bf16_after(profile), correct=after, rows=100),
    ]


def test_a_model_further_from_fp32_than_before_is_worse() -> None:
    assert Comparison([_row("cpu", 0.02, 0.03)]).made_worse(by_labels=False) == "relative_l2 0.03, 0.02 before"
    assert Comparison([_row("cpu", 0.02, 0.02)]).made_worse(by_labels=False) is None
    assert Comparison([_row("cpu", 0.02, 0.01)]).made_worse(by_labels=False) is None


def test_the_worst_profile_decides() -> None:
    """A good profile may get worse if the worst one improves. A profile that did not exist before does not count."""
    assert Comparison([_row("cpu", 0.001, 0.002), _row("cuda", 0.03, 0.01)]).made_worse(by_labels=False) is None
    assert Comparison([_row("cpu", 0.001, 0.0), _row("cuda", 0.03, 0.04)]).made_worse(by_labels=False)
    assert Comparison([_row("cpu", 0.02, 0.01), _row("cuda", None, 0.5)]).made_worse(by_labels=False) is None
    assert Comparison([_row("cpu", 0.02, 0.5, metric="max_abs")]).made_worse(by_labels=False) is None


def test_by_labels_fewer_correct_rows_are_worse() -> None:
    found = Comparison([_row("cpu", 0.02, 0.5)], _right("cpu", 90, 95), {"cpu": []})
    assert found.made_worse(by_labels=True) is None
    found = Comparison([_row("cpu", 0.02, 0.01)], _right("cpu", 90, 89), {"cpu": []})
    assert found.made_worse(by_labels=True) == "0.8900 of the labelled rows are right, 0.9000 before"
    assert Comparison([_row("cpu", 0.02, 0.5)]).made_worse(by_labels=True) is None
