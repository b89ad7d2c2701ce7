"""What the reports of several workers make of the whole server."""

from __future__ import annotations

import json

import pytest

from service.contract import GATE_FAILED, State
from service.workers.view import Report, SlotState, View

M1, M2 = ("m", 1), ("m", 2)


def report(*states: State, listening: bool = True) -> Report:
    """Versions 1, 2, … of one model in these states."""
    slots = [SlotState("m", at, state, "" if state == "ready" else f"is {state}") for at, state in enumerate(states, 1)]
    return Report(listening, bool(slots) and all(slot.state == "ready" for slot in slots), tuple(slots))


@pytest.mark.parametrize(
    ("reports", "ready", "state", "reason"),
    [
        ((report("ready"), report("ready")), True, "ready", ""),
        ((report("ready"), None), False, "loading", "worker 2 is being started"),
        ((report("ready"), report()), False, "loading", "loading"),
        ((report("ready"), report("ready", listening=False)), False, "ready", ""),
        ((report("loading"), report("unavailable")), False, "unavailable", "worker 2: is unavailable"),
        ((report("unavailable"), report("ready")), False, "unavailable", "worker 1: is unavailable"),
        ((None, None), False, "loading", "worker 1 is being started"),
    ],
)
def test_a_version_is_what_the_worst_worker_has_of_it(
    reports: tuple[Report | None, ...], ready: bool, state: State, reason: str
) -> None:
    view = View.of(reports, [M1])
    assert (view.ready, view.slots[M1].state, view.slots[M1].reason) == (ready, state, reason)


def test_what_any_worker_could_not_replace_is_told_of_the_version() -> None:
    broken = Report(True, True, (SlotState("m", 1, "ready", "the previously loaded version still serves"),))
    for reports in ([report("ready"), broken], [broken, report("ready")]):
        assert "the previously loaded version still serves" in View.of(reports, [M1]).slots[M1].reason


def test_of_workers_that_have_the_same_the_one_is_shown_whose_golden_gate_failed() -> None:
    well, ill = {"golden": "golden samples within budget"}, {"golden": f"{GATE_FAILED} just now"}
    reports = [Report(True, True, (SlotState("m", 1, "ready", "", each),)) for each in (well, ill, well)]
    assert View.of(reports, [M1]).slots[M1].model == ill
    assert View.of(reports[:1], [M1]).slots[M1].model == well


def test_one_version_that_is_not_ready_makes_the_server_not_ready() -> None:
    view = View.of([report("ready", "ready"), report("ready", "loading")], [M1, M2])
    assert not view.ready
    assert [slot.state for slot in view.slots.values()] == ["ready", "loading"]


def test_a_version_nobody_wants_any_more_is_unloading_where_a_worker_has_it_still() -> None:
    view = View.of([report("ready", "ready"), report("ready")], [M1])
    assert (view.slots[M2].state, view.slots[M2].reason) == ("unavailable", "unloading")


def test_what_one_worker_has_more_of_keeps_no_ready_server_from_being_ready() -> None:
    added = Report(True, True, (SlotState("m", 1, "ready"), SlotState("m", 2, "loading", "loading")))
    view = View.of([added, report("ready")], [M1])
    assert view.ready
    assert view.slots[M2].state == "unavailable"


def test_a_server_without_models_or_that_is_to_stop_is_not_ready() -> None:
    assert not View.of([report(), report()], []).ready
    assert not View.of([report("ready")], [M1], retired=True).ready


def test_reports_and_views_are_the_same_after_a_journey_as_json() -> None:
    told = Report(True, True, (SlotState("m", 1, "ready", "", {"instances": 1}),))
    assert Report.from_json(json.loads(json.dumps(told.as_json()))) == told
    view = View.of([told], [M1, M2])
    assert View.from_json(json.loads(json.dumps(view.as_json()))) == view
