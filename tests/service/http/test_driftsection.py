from __future__ import annotations

from typing import Any

import pytest
from statusviews import AT, FALLEN, live, recent, running, server

from service.http.driftsection import drift_part, problems
from service.http.page import status_page
from service.http.views import ModelView, RuntimeView


def part(*, specs: RuntimeView | None = None, **changes: object) -> str:
    return drift_part(recent(**changes), specs or running(), AT)  # type: ignore[arg-type]


def test_recent_drift_is_shown_with_its_interval_budget_and_baseline() -> None:
    row = part()[part().index('<th scope="row">relative_l2</th>') :]
    row = row[: row.index("</tr>")]
    for words in ("36\u00a0%", "34\u00a0% to 38\u00a0%", "0.0054", "0.015", "0.0047"):
        assert words in row, words


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.0, None, "not known"), (0.4, None, "over 40\u00a0%"), (1.2, 1.4, "120\u00a0% to 140\u00a0%</span>")],
)
def test_an_interval_without_an_upper_end_is_shown_as_such(low: float, high: float | None, said: str) -> None:
    bounds = {"sentence_embedding": {"relative_l2": low}}, {"sentence_embedding": {"relative_l2": high}}
    assert f">{said}</td>" in part(low=bounds[0], high=bounds[1])


def test_a_share_is_red_only_if_its_whole_interval_is_over_budget() -> None:
    assert '<span class="share over">131' in part(ratio=1.31)
    touching = {"sentence_embedding": {"relative_l2": 0.9}}
    assert '<span class="share">131' in part(ratio=1.31, low=touching)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "within budget"),
        ({"ratio": 1.31}, "over budget"),
        ({"within": False}, "not known yet"),
    ],
)
def test_the_state_is_the_servers(changes: dict[str, Any], state: str) -> None:
    assert f">{state}</span></h3>" in part(**changes)


def test_an_output_of_one_number_per_row_says_what_judges_it() -> None:
    assert "one number per row" not in part()
    seen = recent(output="score")
    object.__setattr__(seen, "ratios", {"score": {"nonfinite": 0.0, "slice_error": 0.1}})
    assert "one number per row, which slice_error judges" in drift_part(seen, running(), AT)


def test_an_output_that_was_never_measured_is_shown_as_such() -> None:
    seen = recent()
    object.__setattr__(seen, "ratios", {})
    said = drift_part(seen, running(), AT)
    assert ">not measured</span>" in said
    assert "No sample was measured yet. The budget: relative_l2 0.015" in said


def test_an_output_shows_its_effective_samples_and_its_change_detector() -> None:
    assert "212 effective samples, change detector at 31\u00a0% of its threshold</th>" in part()
    changed = "change detector at 170\u00a0% of its threshold: changed</span>"
    assert changed in part(change_score={"sentence_embedding": 1.7})
    assert "change detector" not in part(change_score={})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "<dt>Cause</dt><dd>none</dd>"),
        ({"cause": "rounding"}, "<dd>rounding: drift of a size that bf16 rounding explains</dd>"),
        ({"cause": "broken"}, '<span class="over">broken: more drift than rounding explains.'),
        ({"cause": "out_of_range", "out_of_range": {"x<": 1}}, "<code>x&lt;</code>: 1 measured row<"),
        ({"changes": 0}, "<dt>Changes</dt><dd>none since it was loaded</dd>"),
        ({"changes": 3}, "<dt>Changes</dt><dd>3 since it was loaded</dd>"),
        ({}, "<dt>Answers in</dt><dd>bf16</dd>"),
        ({}, "<dt>Reference</dt><dd>up; last sample "),
        (
            {"reference_up": None, "last_sample": None},
            "<dt>Reference</dt><dd>not loaded: no sample was taken yet, or shadow is off</dd>",
        ),
        (
            {"reference_up": False},
            '<span class="over">loading again, or cannot be loaded: drift is not measured</span>; last',
        ),
        ({}, '<dd>passed at <time datetime="2026-01-02T02:39:05+00:00">02:39:05 UTC</time> (25\u00a0min ago)<br>'),
        ({"gate_passed": False}, '<dd><span class="over">failed</span> at <time'),
        ({"gate_passed": None, "gate_at": None}, "<dt>Golden gate</dt><dd><span>golden samples within budget"),
        ({"gate_at": AT - 90_000}, ">2026-01-01 02:04:05 UTC</time> (1\u00a0d 1\u00a0h ago)"),
        ({"gate_at": AT + 5}, "03:04:10 UTC</time> (0\u00a0s ago)"),
    ],
)
def test_the_facts_on_drift_are_shown(changes: dict[str, Any], words: str) -> None:
    assert words in part(**changes)


def test_an_fp32_fallback_is_shown_with_its_start_reason_and_count() -> None:
    said = part(specs=FALLEN, ratio=1.31)
    assert '<dd><span class="over">fp32</span> since <time datetime="2026-01-02T02:58:45+00:00">' in said
    assert "(5\u00a0min 20\u00a0s ago): relative_l2 of output &#x27;sentence_embedding&#x27; is 1.31 times" in said
    assert "fell back 1 time since it was loaded" in said
    assert "</span> since" not in part(specs=FALLEN, ratio=1.31, fallback_since=None)


def test_problems_are_listed_and_a_ratio_above_1_alone_is_none() -> None:
    def told(**changes: object) -> list[str]:
        return problems(ModelView("m", 1, "ready", "", running(), recent(**changes)))  # type: ignore[arg-type]

    assert told() == []
    assert told(gate_passed=None, reference_up=None) == [], "what has not happened yet is no trouble"
    assert told(ratio=1.2, over=False, cause="", fallback=False) == []
    assert told(ratio=1.31, fallback=False, cause="") == ["drift is 131\u00a0% of its budget"]
    assert [words[:10] for words in told(ratio=1.31, gate_passed=False, reference_up=False)] == [
        "drift is 1", "is broken:", "failed its", "answers in", "drift is n",
    ]  # fmt: skip
    assert problems(ModelView("m", 1, "ready", "")) == []
    off = ModelView("m", 1, "ready", "", running(), recent(reference_up=False), "it died twice")
    assert problems(off) == ["drift is not measured: it died twice"]


def test_a_reference_that_is_loaded_for_the_first_time_is_no_problem() -> None:
    seen = recent(reference_up=False, last_sample=None)
    model = ModelView("m", 1, "ready", "", running(), seen)
    assert problems(model) == []
    assert "<dt>Reference</dt><dd>loading</dd>" in drift_part(seen, running(), AT)
    assert 'class="verdict"' in status_page(server([model]))
    object.__setattr__(seen.total, "samples", {"failed": 1})
    assert [words[:10] for words in problems(model)] == ["drift is n"]
    assert 'class="verdict bad"' in status_page(server([model]))


def test_a_fallback_is_a_problem_even_within_the_budget() -> None:
    seen = recent(fallback=True, fallback_since=AT - 10)
    page = status_page(server([ModelView("m", 1, "ready", "", running(), seen)]))
    assert "Ready: 1 model answers, and 1 with problems" in page
    assert "answers in fp32, because bf16 went over its budget" in page
    assert 'class="verdict bad"' in page


def test_live_drift_is_part_of_the_json() -> None:
    view = server([ModelView("m", 1, "ready", "", running(), recent(high={"y": {"relative_l2": None}}))])
    assert b'"effective_samples": {"sentence_embedding": 212.4}' in view.as_json()
    assert live().fallback_since is None


def test_a_reference_that_stays_off_is_shown_with_the_reason() -> None:
    seen = recent(reference_up=False)
    assert '<span class="over">it died &lt;twice&gt;</span>; last' in drift_part(seen, running(), AT, "it died <twice>")
    page = status_page(server([ModelView("m", 1, "ready", "", running(), seen, "it died <twice>")]))
    assert "it died &lt;twice&gt;" in page
