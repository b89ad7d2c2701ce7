"""The options of a recovery: what they mean, and which of their values are rejected."""

from __future__ import annotations

from typing import Any

import pytest

from bf16kit.messages.errors import UsageError
from converter.recovery.settings import FIRST_SCALE, Scaling, parse_scaling, parse_settings

GIVEN: dict[str, Any] = {
    "data": "m:f",
    "evaluation": None,
    "steps": 25,
    "precision": "bf16-mixed",
    "loss_scaling": None,
    "loss": "distillation",
    "learning_rate": 1e-3,
    "device": "cpu",
    "every": None,
    "resume": False,
}


def test_each_precision_has_the_scaling_that_it_needs() -> None:
    assert parse_scaling(None, "bf16-mixed") == parse_scaling(None, "bf16-true") == Scaling("none")
    assert parse_scaling(None, "16-mixed") == Scaling("dynamic", FIRST_SCALE)


@pytest.mark.parametrize(
    ("text", "scaling"),
    [
        ("none", Scaling("none")),
        ("static=1024", Scaling("static", 1024.0)),
        ("static=1e3", Scaling("static", 1000.0)),
        ("dynamic", Scaling("dynamic", FIRST_SCALE, 2000)),
        ("dynamic=50", Scaling("dynamic", FIRST_SCALE, 50)),
    ],
)
def test_a_scaling_is_read_and_written_alike(text: str, scaling: Scaling) -> None:
    assert parse_scaling(text, "16-mixed") == scaling
    assert parse_scaling(str(scaling), "16-mixed") == scaling


@pytest.mark.parametrize(
    "text", ["", "static", "static=", "static=many", "static=0.5", "static=nan", "static=1e39", "dynamic=", "dynamic=0",
             "dynamic=1.5", "none=1", "auto"]
)  # fmt: skip
def test_an_invalid_scaling_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="--loss-scaling"):
        parse_scaling(text, "16-mixed")


@pytest.mark.parametrize("text", ["static=1024", "dynamic"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_loss_scaling_of_bf16_is_rejected_with_the_reason(text: str, precision: Any) -> None:
    with pytest.raises(UsageError, match="bf16 has the exponents of fp32"):
        parse_scaling(text, precision)


def test_a_checkpoint_is_kept_every_tenth_of_the_steps() -> None:
    assert parse_settings(GIVEN).checkpoint_every == 2
    assert parse_settings(GIVEN | {"every": 7}).checkpoint_every == 7
    assert parse_settings(GIVEN | {"steps": 3}).checkpoint_every == 1


@pytest.mark.parametrize("steps", [0, -1])
def test_fewer_than_one_step_is_rejected(steps: int) -> None:
    with pytest.raises(UsageError, match=rf"--steps {steps}: .* use bf16-convert checkpoint"):
        parse_settings(GIVEN | {"steps": steps})


@pytest.mark.parametrize("rate", [0.0, -1e-3, 1.0, float("nan"), float("inf")])
def test_a_learning_rate_must_lie_between_0_and_1(rate: float) -> None:
    with pytest.raises(UsageError, match=r"--learning-rate .* the default is 0.001"):
        parse_settings(GIVEN | {"learning_rate": rate})
