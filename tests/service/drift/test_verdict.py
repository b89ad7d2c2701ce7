from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from service.drift.verdict import DriftVerdict

OVER = DriftVerdict(
    "m", 3, "over", "broken", "y", "relative_l2", math.inf, 1.5, math.inf, 87.5, 412, True, 1700000000.5
)


@pytest.mark.parametrize("verdict", [OVER, OVER.with_plan("plan"), DriftVerdict.unknown("m", 1)])
def test_a_verdict_with_infinities_survives_json(verdict: DriftVerdict) -> None:
    assert DriftVerdict.from_json(json.loads(json.dumps(verdict.to_json(), allow_nan=False))) == verdict


def test_a_verdict_with_nan_survives_json() -> None:
    told = json.loads(json.dumps(replace(OVER, low=math.nan).to_json(), allow_nan=False))
    assert math.isnan(DriftVerdict.from_json(told).low)


@pytest.mark.parametrize("field", ["state", "cause"])
def test_an_unknown_state_or_cause_is_an_error(field: str) -> None:
    with pytest.raises(ValueError, match="sunny"):
        DriftVerdict.from_json(OVER.to_json() | {field: "sunny"})


def test_told_holds_what_must_be_reported_at_once() -> None:
    assert OVER.status == ("over", "broken", True)
