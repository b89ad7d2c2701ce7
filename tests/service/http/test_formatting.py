from __future__ import annotations

import pytest

from service.http import formatting


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "–"),
        (0, "0"),
        (0.00012345, "0.000123"),
        (1.8e-5, "1.8e-05"),
        (4.2199, "4.22"),
        (99.96, "100"),
        (12345.6, "12,346"),
        (1_234_567, "1.23 M"),
        (2e9, "2 G"),
    ],
)
def test_numbers_have_three_significant_digits(value: float | None, words: str) -> None:
    assert formatting.number(value) == words.replace(" ", "\u00a0")


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "–"), (0, "0 s"), (4.2e-5, "42 µs"), (0.0021, "2.1 ms"), (0.25, "250 ms"), (10, "10 s"), (250, "250 s")],
)
def test_seconds_have_the_unit_that_fits(value: float | None, words: str) -> None:
    assert formatting.seconds(value) == words.replace(" ", "\u00a0")


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "–"), (0, "0 %"), (0.0042, "0.42 %"), (0.137, "14 %"), (1.0, "100 %"), (9.99, "999 %"), (42.0, "42 ×")],
)
def test_shares_are_percent_and_multiples(value: float | None, words: str) -> None:
    assert formatting.share(value) == words.replace(" ", "\u00a0")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.4, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (307, "5 min 7 s"),
        (7200, "2 h"),
        (93_784, "1 d 2 h"),
        (86_400, "1 d"),
    ],
)
def test_durations_have_two_units_at_most(value: float, words: str) -> None:
    assert formatting.duration(value).replace("\u00a0", " ") == words


def test_sizes_and_plurals() -> None:
    assert [formatting.size(n).replace("\u00a0", " ") for n in (1024, 45_196_288)] == ["1.0 kB", "45.2 MB"]
    assert [formatting.plural(n, "model") for n in (0, 1, 1200)] == ["0 models", "1 model", "1,200 models"]
