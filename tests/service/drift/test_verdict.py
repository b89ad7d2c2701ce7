from __future__ import annotations

import json
import math
from dataclasses import replace

from service.drift.verdict import DriftVerdict
from service.peers.channel import from_json, to_json

OVER = DriftVerdict(
    "m", 3, "over", "broken", "y", "relative_l2", math.inf, 1.5, math.inf, 87.5, 412, True, 1700000000.5, "plan"
)


def test_a_verdict_with_infinities_and_nan_reaches_another_process() -> None:
    for verdict in (OVER, DriftVerdict("m", 1)):
        assert from_json(DriftVerdict, json.loads(json.dumps(to_json(verdict)))) == verdict
    sent = from_json(DriftVerdict, json.loads(json.dumps(to_json(replace(OVER, low=math.nan)))))
    assert math.isnan(sent.low)
