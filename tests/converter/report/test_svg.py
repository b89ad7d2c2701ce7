"""Drawing SVG: ticks are round, scales clamp values, and all text is escaped."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from converter.report.svg import Picture, Scale, axes, number, power_of_two, shortened, ticks

HOSTILE = '"><script>alert(1)</script>\x1b[31m'


def test_a_scale_clamps_values_beyond_its_range() -> None:
    scale = Scale(0, 10, 100, 0)
    assert [scale(v) for v in (0, 5, 10, -3, 99, math.inf, -math.inf)] == [100, 50, 0, 100, 0, 0, 100]
    assert Scale(1, 1, 5, 9)(1) == 5


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0, 0.0212, [0, 0.005, 0.01, 0.015, 0.02]), (22, 61, [30, 40, 50, 60])],
)
def test_ticks_are_round_numbers_within_the_range(low: float, high: float, expected: list[float]) -> None:
    assert list(ticks(low, high)) == pytest.approx(expected)


def test_ticks_of_counts_are_whole_numbers() -> None:
    assert list(ticks(0, 1, integers=True)) == [0, 1]


def test_an_empty_range_has_one_tick() -> None:
    assert list(ticks(3, 3)) == [3]


def test_the_labels_of_ticks_are_short() -> None:
    assert [number(v) for v in (0.0, 20.0, 0.005, 0.30000000000000004, 1e6)] == ["0", "20", "0.005", "0.3", "1e+06"]


def test_powers_are_superscripts_and_long_names_are_shortened() -> None:
    assert power_of_two(-126) == "2⁻¹²⁶"
    assert shortened("abc", 3) == "abc"
    assert shortened("encoder.layer.11.weight", 11) == "encod…eight"
    assert len(shortened("x" * 100, 12)) == 12


def test_a_picture_is_labelled_xml_with_hostile_text_escaped() -> None:
    picture = Picture("k", HOSTILE, HOSTILE, 100)
    axes(picture, Scale(0, 9, 10, 90), Scale(0, 1, 90, 10), HOSTILE, "y")
    picture.add("text", HOSTILE, x=1)
    picture.add("rect", class_=HOSTILE)
    picture.dot(1, 2, "over", HOSTILE)
    picture.dot(1, 2, "", HOSTILE)
    drawn = picture.svg()
    tree = ElementTree.fromstring(drawn)
    assert {element.tag for element in tree.iter()} <= {"svg", "title", "desc", "text", "line", "rect", "circle"}
    assert tree.attrib["aria-labelledby"] == "k-title k-desc"
    assert [tree[0].attrib["id"], tree[1].attrib["id"]] == ["k-title", "k-desc"]
    assert "\x1b" not in drawn
