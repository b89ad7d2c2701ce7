from __future__ import annotations

import re
from collections.abc import Sequence

from service.http import formatting
from service.http.sparkline import sparkline


def drawn(points: Sequence[float | None], bound: float | None = None, length: int = 10) -> str:
    return sparkline("Things", "last 5 min", points, formatting.number, length=length, bound=bound)


def path(picture: str) -> str:
    found = re.search(r'class="trace" d="([^"]*)"', picture)
    assert found is not None
    return found[1]


def test_a_sparkline_has_its_numbers_as_a_label() -> None:
    assert 'role="img" aria-label="Things, last 5 min: last 2, least 1, most 3"' in drawn([1, 3, None, 2])


def test_the_newest_point_is_at_the_right_edge_and_the_highest_at_the_top() -> None:
    assert path(drawn([0, 2, 1])) == "M7 40V40l1-38 1 19V40"
    assert 'viewBox="0 0 9 40"' in drawn([0])


def test_more_points_than_there_is_room_for_lose_the_oldest() -> None:
    assert "most 5" in drawn([100, 1, 5], length=2)
    assert path(drawn([100, 1, 5], length=2)) == "M0 40V32l1-30V40"


def test_a_missing_value_interrupts_the_line() -> None:
    assert path(drawn([1, 1, None, 1])) == "M6 40V2l1 0V40M9 40V2V40"


def test_a_level_stretch_takes_two_points() -> None:
    assert path(drawn([1] * 10)) == "M0 40V2l9 0V40"


def test_zeros_are_drawn_on_the_bottom_line() -> None:
    assert path(drawn([0, 0])) == "M8 40V40l1 0V40"


def test_a_limit_is_drawn_whether_above_or_below_the_points() -> None:
    assert '<path class="limit" d="M0 2H9"/>' in drawn([0.5], bound=1.0)
    assert '<path class="limit" d="M0 21H9"/>' in drawn([2.0], bound=1.0)


def test_without_any_value_there_is_no_sparkline() -> None:
    assert drawn([None, None]) == '<p class="spark none">Things: nothing to draw yet</p>'
    assert drawn([]) == drawn([None])


def test_a_name_is_escaped() -> None:
    assert "<b>" not in sparkline("<b>", "<b>", [1.0], formatting.number, length=3)
