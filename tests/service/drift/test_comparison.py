from __future__ import annotations

import numpy as np
import pytest

from bf16kit.drift import Budget, SampleDrift
from bf16kit.errors import ArtifactError
from bf16kit.tensors import TensorSpec
from service.drift.comparison import WINDOW, Comparison
from service.drift.gate import judge

SPECS = (TensorSpec("y", "float32", ("batch", 2), "embedding"), TensorSpec("z", "float32", ("batch", 2), "logits"))
ONES = np.ones((1, 2), np.float32)


class Heard:
    """What the comparison told its observer."""

    def __init__(self) -> None:
        self.drifts: list[str] = []
        self.ratios: dict[tuple[str, str], float] = {}

    def drift(self, output: str, sample: SampleDrift, weight: float) -> None:
        self.drifts.append(output)

    def budget_ratio(self, output: str, metric: str, ratio: float, low: float, high: float) -> None:
        self.ratios[output, metric] = ratio

    def recent(self, output: str, effective_samples: float, change_score: float | None) -> None:
        pass

    def changed(self, output: str) -> None:
        pass

    def out_of_range(self, name: str, rows: int) -> None:
        pass

    def judged(self, over: bool, cause: str) -> None:
        pass


def test_an_output_that_was_not_asked_for_is_passed_over() -> None:
    heard = Heard()
    Comparison(SPECS, 0, Budget()).observe({"y": ONES, "z": ONES}, {"z": ONES}, heard)
    assert heard.drifts == ["z"]


def test_the_ratio_is_of_recent_samples_so_an_old_breach_is_forgotten() -> None:
    heard = Heard()
    comparison = Comparison(SPECS[:1], 0, Budget())
    comparison.observe({"y": ONES}, {"y": ONES * 2}, heard)
    assert heard.ratios["y", "relative_l2"] == pytest.approx(1 / 1.5e-2)
    for _ in range(WINDOW):
        comparison.observe({"y": ONES}, {"y": ONES}, heard)
    assert heard.ratios["y", "relative_l2"] == 0


def test_only_logits_have_a_ratio_of_agreement() -> None:
    heard = Heard()
    Comparison(SPECS, 0, Budget()).observe({"y": ONES, "z": ONES}, {"y": ONES, "z": ONES}, heard)
    assert {output for output, metric in heard.ratios if metric == "top1_agreement"} == {"z"}


def test_judging_names_every_breach_and_says_the_drift_of_each_output() -> None:
    breaches, words = judge({"y": ONES, "z": ONES}, {"y": ONES * 2, "z": ONES}, SPECS, 0, Budget())
    assert [str(b) for b in breaches] == ["output 'y': relative_l2 is 1, the budget allows at most 0.015"]
    assert words == "y relative_l2 1, z relative_l2 0"


def test_an_output_without_golden_samples_cannot_be_judged() -> None:
    with pytest.raises(ArtifactError, match="hold no output 'z'"):
        judge({"y": ONES}, {"y": ONES, "z": ONES}, SPECS, 0, Budget())


def test_golden_samples_of_another_shape_are_an_error_and_no_drift() -> None:
    for theirs in (np.ones((0, 2), np.float32), np.ones((3, 2), np.float32), np.ones(2, np.float32)):
        with pytest.raises(ArtifactError, match=r"output 'y' has shape .*, and the model gives \[1, 2\]"):
            judge({"y": theirs}, {"y": ONES}, SPECS[:1], 0, Budget())


def test_a_reference_without_rows_measures_nothing() -> None:
    with pytest.raises(ArtifactError, match="the fp32 reference's output 'y' has no rows"):
        Comparison(SPECS, 0, Budget()).observe({"y": np.ones((0, 2), np.float32)}, {"y": ONES}, Heard())
