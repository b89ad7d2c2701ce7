"""Which of the measured settings are suggested, and the sentence that gives the reason."""

from __future__ import annotations

from service.commands.advice import Candidate, Measurement, advise
from service.commands.layouts import Layout

ONE, TWO = Layout(1, 2), Layout(2, 1)


def candidate(layout: Layout, *seen: tuple[int, float, float], rows: int = 8) -> Candidate:
    return Candidate(layout, rows, tuple(Measurement(*each) for each in seen))


def test_the_best_rate_wins_and_the_sentence_has_the_numbers() -> None:
    found = advise([candidate(ONE, (1, 100, 0.01), (16, 400, 0.04)), candidate(TWO, (16, 500, 0.05))], None)
    assert (found.layout, found.max_rows, found.at.clients) == (TWO, 8, 16)
    assert found.reason == (
        "2 instances of 1 thread each with batches of up to 8 gave 500 rows/s at 16 clients, p99 50 ms;"
        " the next best, 1 instance of 2 threads with batches of up to 8, 400 (-20%)"
    )


def test_less_than_three_percent_is_not_worth_more_instances() -> None:
    found = advise([candidate(ONE, (16, 490, 0.04)), candidate(TWO, (16, 500, 0.05))], None)
    assert found.layout == ONE
    assert "less than 3 % more" in found.reason


def test_a_latency_target_excludes_slower_settings() -> None:
    found = advise([candidate(ONE, (1, 100, 0.01), (16, 400, 0.04)), candidate(TWO, (16, 500, 0.05))], 0.045)
    assert (found.layout, found.at.clients) == (ONE, 16)
    assert "within 45 ms" in found.reason


def test_a_latency_target_that_no_setting_meets_is_reported() -> None:
    found = advise([candidate(ONE, (1, 100, 0.01)), candidate(TWO, (1, 80, 0.02))], 0.001)
    assert found.layout == ONE
    assert found.reason.startswith("no layout keeps p99 within 1 ms: the nearest is 1 instance of 2 threads")


def test_without_batching_the_reason_does_not_mention_batches() -> None:
    assert "batches" not in advise([candidate(ONE, (1, 100, 0.01), rows=0)], None).reason
