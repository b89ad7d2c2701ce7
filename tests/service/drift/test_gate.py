import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from bf16kit.drift.metrics import Breach, Budget
from bf16kit.service.contract import Array
from bf16kit.service.drift.gate import (
    MIN_INTERVAL_SECONDS,
    RETRY_SECONDS,
    ProcessRank,
    Timetable,
    breach_verdict,
    run_in_parts,
)

HOUR = 3600.0


def middle() -> float:
    return 0.5


def test_the_gate_is_due_once_in_each_period_at_a_random_moment() -> None:
    drawn = iter([0.0, 1.0, *[0.5] * 9])
    table = Timetable(HOUR, ProcessRank(), 0.0, lambda: next(drawn))
    assert not table.due_reason(0.25 * HOUR - 1)
    assert table.due_reason(0.25 * HOUR) == "on schedule"
    table.begin()
    table.end(0.25 * HOUR + 5, "passed")
    assert not table.due_reason(1.75 * HOUR - 1)
    assert table.due_reason(1.75 * HOUR)
    table.end(1.75 * HOUR, "passed")
    assert not table.due_reason(2.5 * HOUR - 1)
    assert table.due_reason(2.5 * HOUR)
    table.end(9.0 * HOUR, "passed")
    assert not table.due_reason(9.0 * HOUR), "periods that were missed are not made up for"


def test_the_workers_parts_of_the_period_do_not_overlap() -> None:
    """Whatever is drawn, the last moment of one worker is before the first moment of the next."""
    moments = []
    for number in range(3):
        for share in (0.0, 1.0):
            table = Timetable(HOUR, ProcessRank(number, 3), 0.0, lambda share=share: share)  # type: ignore[misc]
            moments.append(next(at for at in range(int(HOUR)) if table.due_reason(float(at))))
    assert moments == sorted(moments)
    assert min(later - earlier for earlier, later in zip(moments[1::2], moments[2::2], strict=False)) > 500


def test_a_failed_run_triggers_the_gate_without_a_schedule_even_if_it_fails_while_the_gate_runs() -> None:
    table = Timetable(0.0, ProcessRank(), 0.0, middle)
    assert not table.due_reason(1e9)
    table.note_failed_run()
    assert not table.due_reason(MIN_INTERVAL_SECONDS - 1)
    assert table.due_reason(MIN_INTERVAL_SECONDS) == "after a run that failed"
    table.begin()
    table.note_failed_run()
    table.end(20.0, "passed")
    assert not table.due_reason(20.0 + MIN_INTERVAL_SECONDS - 1), "runs that keep failing trigger it at intervals only"
    assert table.due_reason(20.0 + MIN_INTERVAL_SECONDS)
    table.begin()
    table.end(40.0, "passed")
    assert not table.due_reason(1e9)


@pytest.mark.parametrize("seconds", [0.0, HOUR])
@pytest.mark.parametrize("outcome", ["failed", "error"])
def test_a_gate_that_was_not_passed_is_run_again_soon(seconds: float, outcome: str) -> None:
    table = Timetable(seconds, ProcessRank(), 0.0, middle)
    table.end(1.0, outcome)  # type: ignore[arg-type]
    assert not table.due_reason(RETRY_SECONDS)
    assert table.due_reason(1.0 + RETRY_SECONDS) == "again, for it was not passed"
    table.end(1.0 + RETRY_SECONDS, "passed")
    assert not table.due_reason(0.5 * HOUR - 1)


def test_the_verdict_names_the_bound_that_is_exceeded_most() -> None:
    budget = Budget({"relative_l2": 0.01, "max_abs": 1.0})
    breaches = [Breach("y", "max_abs", 3.0, 1.0), Breach("z", "relative_l2", 0.05, 0.01)]
    found = breach_verdict("m", 2, breaches, budget, 4, 12.5)
    assert (found.model, found.version, found.state, found.cause) == ("m", 2, "over", "broken")
    assert (found.output, found.metric, found.samples, found.at) == ("z", "relative_l2", 4, 12.5)
    assert found.ratio == found.low == found.high == pytest.approx(5.0)
    not_run = breach_verdict("m", 1, [], budget, 1, 0.0)
    assert (not_run.state, not_run.cause, not_run.output, not_run.low) == ("over", "broken", "", math.inf)


# --- running samples in parts -----------------------------------------------------------------------------------------

FEEDS = {"x": np.arange(20.0, dtype=np.float32).reshape(2, 10), "scale": np.ones((1, 10), np.float32)}


@pytest.mark.parametrize(
    ("answer", "axis", "most", "columns"),
    [
        (lambda x: 2 * x, 1, 4, [4, 4, 2]),
        (lambda x: 2 * x, None, 4, [10]),
        (lambda x: 2 * x, 1, 10, [10]),
        (lambda x: x.sum(1, keepdims=True), 1, 4, [4, 4, 2, 10]),
        (lambda x: np.ones((int(x.max()), x.shape[1]), np.float32), 1, 4, [4, 4, 2, 10]),
    ],
    ids=["parts", "no batch axis", "few samples", "an output without rows", "an output sized by values"],
)
def test_samples_run_in_parts_give_the_outputs_of_one_run(
    answer: Callable[[Array], Array], axis: int | None, most: int, columns: list[int]
) -> None:
    ran = list[int]()

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        assert feeds["x"].shape[1] == feeds["scale"].shape[1]
        ran.append(feeds["x"].shape[1])
        return {"y": answer(feeds["x"])}

    np.testing.assert_array_equal(run_in_parts(run, FEEDS, axis, most)["y"], answer(FEEDS["x"]))
    assert ran == columns
