"""Text for terminals."""

from __future__ import annotations

import pytest

from bf16kit.messages.wording import printable, size, table


def test_a_title_stays_on_one_line_above_a_narrow_table() -> None:
    title = "Drift from the fp32 reference on " + "many samples, " * 10
    assert table(title, ("a",), [(1,)]).splitlines()[0] == title


def test_numbers_have_three_digits_and_none_is_a_dash() -> None:
    assert table("t", ("a", "b", "c"), [(0.123456, None, 123456)]).split()[-3:] == ["0.123", "–", "123456"]


def test_markup_and_control_characters_in_names_are_shown_literally() -> None:
    shown = table("t", ("a",), [("[bold]x[/bold]\x1b[31m\r\n",)])
    assert "[bold]x[/bold]\\x1b[31m\\r\\n" in shown


def test_control_characters_except_line_ends_are_escaped() -> None:
    assert printable("é\x1b\n\udcff") == "é\\x1b\n\\udcff"


def test_a_long_name_is_folded_and_never_cut() -> None:
    shown = table("t", ("a", "b"), [("x" * 500, "end")])
    assert shown.count("x") == 500
    assert "end" in shown


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1000, "1.0 kB"), (90_868_376, "90.9 MB"), (7e9, "7.0 GB"), (3e15, "3000.0 TB")],
)
def test_sizes_have_decimal_units(count: float, text: str) -> None:
    assert size(count) == text
