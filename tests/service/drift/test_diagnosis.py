from __future__ import annotations

import math

import pytest

from bf16kit.drift import SampleDrift
from service.drift.detector import Expected
from service.drift.diagnosis import diagnose, worst
from service.drift.recent import Recent, Window
from service.drift.verdict import Cause

CENTRE = 4e-3
NARROW = Expected(math.log(CENTRE), 0.1, 5.0)
WIDE = Expected(math.log(CENTRE), 1.0, 0.5)


def window(*rows: tuple[float, int, bool], weights: tuple[float, ...] = ()) -> Window:
    """Rows of a drift (a multiple of the centre), a count of elements not finite, and whether an input is outside."""
    recent = Recent()
    for at, (factor, bad, outside) in enumerate(rows):
        drift = SampleDrift(factor * CENTRE, 0.0, 0.0, 0.0, 0, 0, bad)
        recent.add([drift], weights[at] if weights else 1.0, [outside])
    return recent.window()


SOUND, TWICE, FOUR, FAR = (1.0, 0, False), (2.2, 0, False), (5.0, 0, False), (300.0, 0, False)
NAN, OUT_FAR, OUT_NAN, OUT_SOUND = (math.inf, 3, False), (300.0, 0, True), (math.inf, 3, True), (1.0, 0, True)


@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        ([SOUND] * 10, "rounding"),
        ([TWICE] * 10, "rounding"),
        ([FOUR] * 10, "broken"),
        ([SOUND] * 9 + [FAR], "broken"),  # few rows, and those far off
        ([TWICE] * 6 + [FAR] * 4, "rounding"),  # half of the bad rows are not
        ([SOUND] * 9 + [NAN], "broken"),
        ([TWICE] * 9 + [NAN], "broken"),
        ([SOUND] * 9 + [OUT_FAR], "out_of_range"),
        ([SOUND] * 9 + [OUT_NAN], "out_of_range"),
        ([FAR] * 6 + [OUT_FAR] * 4, "broken"),
        ([OUT_SOUND] * 9 + [FAR], "broken"),  # those outside cost nothing
    ],
)
def test_the_rules_are_those_that_are_written_down(rows: list[tuple[float, int, bool]], cause: Cause) -> None:
    assert diagnose(window(*rows), NARROW) == cause


def test_what_spreads_widely_has_to_be_further_off_to_be_broken() -> None:
    assert diagnose(window(*[FOUR] * 10), WIDE) == "rounding"
    assert diagnose(window(*[(20.0, 0, False)] * 10), WIDE) == "rounding"  # bad rows, and less than four spreads off
    assert diagnose(window(*[FAR] * 10), WIDE) == "broken"


def test_where_nothing_is_expected_yet_only_a_lost_output_is_broken() -> None:
    assert diagnose(window(*[FOUR] * 10), None) == "rounding"
    assert diagnose(window(*[FAR] * 10), None) == "broken"
    assert diagnose(window(*[OUT_FAR] * 10), None) == "out_of_range"
    assert diagnose(window(NAN), None) == "broken"


def test_rows_count_by_what_they_speak_for() -> None:
    rows = (FAR, OUT_FAR)
    assert diagnose(window(*rows, weights=(100.0, 1.0)), NARROW) == "broken"
    assert diagnose(window(*rows, weights=(1.0, 100.0)), NARROW) == "out_of_range"


def test_of_several_outputs_the_worst_is_told() -> None:
    assert worst(["none", "rounding", "out_of_range", "broken"]) == "broken"
    assert worst(["none", "rounding", "out_of_range"]) == "out_of_range"
    assert worst(["none", "rounding"]) == "rounding"
    assert worst([]) == "none"
