from __future__ import annotations

import math

import pytest

from bf16kit.drift.metrics import SampleDrift
from service.drift.detector import Expected
from service.drift.diagnosis import diagnose, worst_cause
from service.drift.recent import RecentRows, Window
from service.drift.verdict import Cause

CENTRE = 4e-3
NARROW = Expected(math.log(CENTRE), 0.1, 5.0)
WIDE = Expected(math.log(CENTRE), 1.0, 0.5)


def window(*rows: tuple[float, int], weights: tuple[float, ...] = ()) -> Window:
    """Return a window of rows: drift ÷ centre, and number of elements not finite."""
    recent = RecentRows()
    for at, (factor, bad) in enumerate(rows):
        drift = SampleDrift(factor * CENTRE, 0.0, 0.0, 0.0, 0, 0, bad)
        recent.add([drift], weights[at] if weights else 1.0)
    return recent.window()


SOUND, TWICE, FOUR, FAR, NAN = (1.0, 0), (2.2, 0), (5.0, 0), (300.0, 0), (math.inf, 3)


@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        ([SOUND] * 10, "rounding"),
        ([TWICE] * 10, "rounding"),
        ([FOUR] * 10, "broken"),
        ([SOUND] * 9 + [FAR], "broken"),  # few bad rows, but they are far off
        ([TWICE] * 6 + [FAR] * 4, "rounding"),  # more than half of the bad rows are not far off
        ([SOUND] * 9 + [NAN], "broken"),
        ([TWICE] * 9 + [NAN], "broken"),
    ],
)
def test_the_cause_follows_the_documented_rules(rows: list[tuple[float, int]], cause: Cause) -> None:
    assert diagnose(window(*rows), NARROW) == cause


def test_with_a_wide_spread_rows_must_be_farther_off_to_be_broken() -> None:
    assert diagnose(window(*[FOUR] * 10), WIDE) == "rounding"
    assert diagnose(window(*[(20.0, 0)] * 10), WIDE) == "rounding"  # bad rows, but less than four spreads off
    assert diagnose(window(*[FAR] * 10), WIDE) == "broken"


def test_without_an_expectation_only_a_lost_output_is_broken() -> None:
    assert diagnose(window(*[FOUR] * 10), None) == "rounding"
    assert diagnose(window(*[FAR] * 10), None) == "broken"
    assert diagnose(window(NAN), None) == "broken"


def test_rows_count_by_their_weight() -> None:
    rows = (FAR, TWICE)
    assert diagnose(window(*rows, weights=(100.0, 1.0)), NARROW) == "broken"
    assert diagnose(window(*rows, weights=(1.0, 100.0)), NARROW) == "rounding"


def test_the_worst_cause_of_several_outputs_is_reported() -> None:
    assert worst_cause(["none", "rounding", "broken"]) == "broken"
    assert worst_cause(["none", "rounding"]) == "rounding"
    assert worst_cause([]) == "none"
