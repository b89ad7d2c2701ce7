"""The part of serving.yaml about live drift."""

from __future__ import annotations

import pytest

from service.drift.policy import ShadowPolicy


@pytest.mark.parametrize(
    ("given", "on"),
    [({}, True), ({"rate": 0}, False)],
)
def test_nothing_is_measured_if_the_rate_is_0(given: dict[str, object], on: bool) -> None:
    assert ShadowPolicy.model_validate(given).on == on


def test_a_policy_survives_being_sent_to_another_process() -> None:
    policy = ShadowPolicy(rate=0.5, max_rows=5)
    assert ShadowPolicy.model_validate(policy.model_dump(mode="json")) == policy
