"""The process that has the fp32 references."""

from __future__ import annotations

from service.shadow.references import Outcomes


def test_outcomes_are_returned_in_order_once_all_are_known() -> None:
    outcomes = Outcomes(3)
    outcomes.record(2, "measured")
    outcomes.record(0, "dropped")
    assert not outcomes.response.done()
    outcomes.record(1, "failed")
    assert outcomes.response.result() == {"outcomes": ["dropped", "failed", "measured"]}
