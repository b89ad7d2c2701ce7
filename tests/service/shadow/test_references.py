"""The process that has the fp32 references."""

from __future__ import annotations

from service.shadow.references import Outcomes


def test_what_became_of_samples_is_told_in_their_order_when_the_last_is_known() -> None:
    outcomes = Outcomes(3)
    outcomes.told(2, "measured")
    outcomes.told(0, "dropped")
    assert not outcomes.answer.done()
    outcomes.told(1, "failed")
    assert outcomes.answer.result() == {"outcomes": ["dropped", "failed", "measured"]}
