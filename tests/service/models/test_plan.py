"""A desired model stays the same when it is sent from one process to another."""

from __future__ import annotations

import json
from pathlib import Path

from service.models.plan import DesiredModel, FailedVersion, Plan
from service.models.policy import Serving


def test_a_wish_is_the_same_after_it_was_written_and_read() -> None:
    serving = Serving.model_validate(
        {
            "max_batch_size": 4,
            "priority_levels": 2,
            "priority_queue_policy": {1: {"max_queue_size": 3}},
            "version_policy": {"specific": [1, 4]},
            "warmup": [1, 4],
            "shadow": {"rate": 0.5},
            "fallback": {"policy": "fp32", "clean_samples": 50},
            "budget": {"relative_l2": None, "max_abs": 0.1},
        }
    )
    plans = (
        Plan(1, Path("/models/m/1"), serving, "stamp"),
        Plan(4, Path("/models/m/4"), Serving(), "", "a reason ≠ ascii"),
    )
    for desired in (
        DesiredModel("m", plans),
        DesiredModel("gone"),
        DesiredModel("m", plans[:1], (FailedVersion(plans[1], "over the budget"),)),
    ):
        written = desired.to_json()
        assert DesiredModel.from_json(written) == desired
        assert isinstance(json.loads(written), dict)
    assert [plan.finished for plan in plans] == [True, False]
