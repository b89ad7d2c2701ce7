"""The view of the whole server, from the reports of several workers."""

from __future__ import annotations

import json

import pytest

from service.contract import GATE_FAILED, State
from service.workers.view import Report, SlotState, View

M1, M2 = ("m", 1), ("m", 2)


def report(*states: State, listening: bool = True) -> Report:
    """Return a report with versions 1, 2, … of one model in these states."""
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
def test_a_version_has_its_worst_state_in_any_worker(
    reports: tuple[Report | None, ...], ready: bool, state: State, reason: str
) -> None:
    view = View.of(reports, [M1])
    assert (view.ready, view.slots[M1].state, view.slots[M1].reason) == (ready, state, reason)


@pytest.mark.parametrize(
    ("reports", "ready", "state", "reason"),
    [
        ((report("ready"), None), True, "ready", ""),
        ((None, report("ready")), True, "ready", ""),
        ((report("ready"), report("loading", listening=False)), True, "ready", ""),
        ((report("ready"), report("unavailable", listening=False)), True, "ready", ""),
        ((report("ready"), report("unavailable")), False, "unavailable", "worker 2: is unavailable"),
        ((report("ready"), report()), False, "loading", "loading"),
        ((None, report("loading")), False, "loading", "worker 2: is loading"),
    ],
)
def test_once_all_were_ready_only_workers_that_listen_count(
    reports: tuple[Report | None, ...], ready: bool, state: State, reason: str
) -> None:
    """Clients cannot reach another one: a restarted worker listens once its models are loaded."""
    view = View.of(reports, [M1], was_complete=View.of([report("ready")] * 2, [M1]).complete)
    assert (view.ready, view.slots[M1].state, view.slots[M1].reason) == (ready, state, reason)
    assert view.complete


def test_after_the_end_of_all_workers_the_server_is_ready_once_all_are_again() -> None:
    complete = True
    for reports in ((None, None), (report("ready"), None), (report("ready"), report("ready", listening=False))):
        view = View.of(reports, [M1], was_complete=complete)
        complete = view.complete
        assert not view.ready
    assert View.of([report("ready")] * 2, [M1], was_complete=complete).ready


def test_a_reason_that_names_the_worker_that_failed_is_shown_as_it_is() -> None:
    aside = Report(
        True, True, (SlotState("m", 1, "unavailable", "worker 2: over the budget; version 3 serves instead"),)
    )
    assert View.of([aside, aside], [M2]).slots[M1].reason == "worker 2: over the budget; version 3 serves instead"


def test_a_failed_replacement_in_any_worker_is_shown_for_the_version() -> None:
    broken = Report(True, True, (SlotState("m", 1, "ready", "the previously loaded version still serves"),))
    for reports in ([report("ready"), broken], [broken, report("ready")]):
        assert "the previously loaded version still serves" in View.of(reports, [M1]).slots[M1].reason


def test_the_worker_whose_golden_gate_failed_is_shown_for_the_version() -> None:
    well, ill = {"golden": "golden samples within budget"}, {"golden": f"{GATE_FAILED} just now"}
    reports = [Report(True, True, (SlotState("m", 1, "ready", "", each),)) for each in (well, ill, well)]
    assert View.of(reports, [M1]).slots[M1].model == ill
    assert View.of(reports[:1], [M1]).slots[M1].model == well


def test_one_version_that_is_not_ready_makes_the_server_not_ready() -> None:
    view = View.of([report("ready", "ready"), report("ready", "loading")], [M1, M2])
    assert not view.ready
    assert [slot.state for slot in view.slots.values()] == ["ready", "loading"]


def test_an_unwanted_version_that_a_worker_still_has_is_unloading() -> None:
    view = View.of([report("ready", "ready"), report("ready")], [M1])
    assert (view.slots[M2].state, view.slots[M2].reason) == ("unavailable", "unloading")


def test_an_extra_version_in_one_worker_does_not_affect_readiness() -> None:
    added = Report(True, True, (SlotState("m", 1, "ready"), SlotState("m", 2, "loading", "loading")))
    view = View.of([added, report("ready")], [M1])
    assert view.ready
    assert view.slots[M2].state == "unavailable"


def test_a_server_that_has_no_models_or_is_stopping_is_not_ready() -> None:
    assert not View.of([report(), report()], []).ready
    assert not View.of([report("ready")], [M1], retired=True).ready


def test_reports_and_views_are_unchanged_by_json() -> None:
    told = Report(True, True, (SlotState("m", 1, "ready", "", {"instances": 1}),))
    assert Report.from_json(json.loads(json.dumps(told.as_json()))) == told
    view = View.of([told], [M1, M2])
    assert View.from_json(json.loads(json.dumps(view.as_json()))) == view
