"""What the report says about a recovery and the weights that it kept."""

from __future__ import annotations

from typing import Any

from bf16kit.artifact.recoveryentries import LookEntry, TrainingEntry
from converter.report.recovery import sentences

_BEFORE: dict[str, Any] = {
    "steps": 20, "skipped": 0, "precision": "32-true", "computed": "float32", "device": "cpu", "loss": "distillation",
    "loss_first": 1.0, "loss_last": 0.5, "learning_rate": 1e-3, "scaling": "none", "scale_first": 1.0,
    "scale_last": 1.0, "weights": 1,
}  # fmt: skip


def _looks(*losses: float) -> list[LookEntry]:
    return [LookEntry(step=place * 10, loss=loss) for place, loss in enumerate(losses)]


def _said(**more: Any) -> str:
    return "\n".join(sentences(TrainingEntry(**_BEFORE, yardstick=8, loss_before=0.5, **more)))


def test_the_best_weights_are_reported_with_the_losses_that_chose_them() -> None:
    found = _said(biases_corrected=3, looks=_looks(0.04, 0.01, 0.02), kept=10, rate_share=0.5)
    assert "loss before training, on 8 batches of --data by which the best weights are chosen: 0.5" in found
    assert "loss after 3 biases were corrected for the average rounding error: 0.04" in found
    assert "kept: the weights after step 10, with a loss of 0.01" in found
    assert "and halved the learning rate: at the end 0.5 of --learning-rate" in found


def test_training_that_improved_nothing_is_reported() -> None:
    found = _said(looks=_looks(0.5, 0.6, 0.7), kept=0)
    assert "kept: the weights before the first step, because no later weights had a lower loss" in found
    assert "biases were corrected" not in found


def test_an_artifact_of_an_earlier_version_has_no_sentence_on_the_best_weights() -> None:
    assert len(sentences(TrainingEntry(**_BEFORE))) == 2
