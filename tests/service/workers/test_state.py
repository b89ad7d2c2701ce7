"""The state of the whole server: folded from the workers' reports, and looked at in every process."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from beginning import leased
from loopback import LoopbackModel, LoopbackRegistry

from bf16kit.messages.errors import NotFound
from bf16kit.service.contract import GATE_FAILED, State, describe
from bf16kit.service.workers.state import Report, ServerState, SlotState, WorkerRegistry

M1, M2 = ("m", 1), ("m", 2)
Reports = tuple[Report | None, ...]


def report(*states: State, listening: bool = True) -> Report:
    """Return a report with versions 1, 2, … of one model in these states."""
    slots = [SlotState("m", at, state, "" if state == "ready" else f"is {state}") for at, state in enumerate(states, 1)]
    return Report(listening, bool(slots) and all(slot.state == "ready" for slot in slots), tuple(slots))


def folded(*many: Reports, retired: bool = False) -> ServerState:
    """Return the state after these reports, one after another; version 1 is desired."""
    state = ServerState()
    for reports in many:
        state.fold(reports, [M1], retired=retired)
    return state


ALL = (report("ready"), report("ready"))


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
def test_a_version_has_its_worst_state_in_any_worker(reports: Reports, ready: bool, state: State, reason: str) -> None:
    whole = folded(reports)
    assert (whole.ready, whole.slots[M1].state, whole.slots[M1].reason) == (ready, state, reason)


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
    reports: Reports, ready: bool, state: State, reason: str
) -> None:
    """Clients cannot reach another one: a restarted worker listens once its models are loaded."""
    whole = folded(ALL, reports)
    assert (whole.ready, whole.slots[M1].state, whole.slots[M1].reason) == (ready, state, reason)


def test_after_the_end_of_all_workers_the_server_is_ready_once_all_are_again() -> None:
    whole = folded(ALL)
    for reports in ((None, None), (report("ready"), None), (report("ready"), report("ready", listening=False))):
        whole.fold(reports, [M1])
        assert not whole.ready
    whole.fold(ALL, [M1])
    assert whole.ready


@pytest.mark.parametrize(
    ("slots", "state", "reason"),
    [
        # It names the worker that failed already.
        ([("unavailable", "worker 2: over the budget; 3 serves instead")] * 2, "unavailable", "worker 2: over the bud"),
        ([("ready", ""), ("ready", "the previously loaded version still serves")], "ready", "worker 2: the previously"),
        ([("ready", "the previously loaded version still serves"), ("ready", "")], "ready", "worker 1: the previously"),
    ],
)
def test_a_reason_in_any_worker_is_shown(slots: list[tuple[State, str]], state: State, reason: str) -> None:
    whole = folded(tuple(Report(True, True, (SlotState("m", 1, *slot),)) for slot in slots))
    assert whole.slots[M1].state == state
    assert whole.slots[M1].reason.startswith(reason)


def test_a_version_that_is_not_desired_is_unloading_and_does_not_affect_readiness() -> None:
    added = Report(True, True, (SlotState("m", 1, "ready"), SlotState("m", 2, "loading", "loading")))
    for reports in ((report("ready", "ready"), report("ready")), (added, report("ready"))):
        whole = folded(reports)
        assert whole.ready
        assert (whole.slots[M2].state, whole.slots[M2].reason) == ("unavailable", "unloading")


def test_a_server_without_models_with_one_that_loads_or_that_stops_is_not_ready() -> None:
    assert not folded((report(), report())).ready
    assert not folded((report("ready", "ready"), report("ready", "loading"))).ready
    assert not folded(ALL, retired=True).ready


def running(golden: str = "golden samples within budget") -> Mapping[str, Any]:
    model = LoopbackModel("m")
    model.golden = golden
    return describe(model)


def test_the_worker_whose_golden_gate_failed_is_shown_for_the_version() -> None:
    well, ill = running(), running(f"{GATE_FAILED} just now")
    reports = [Report(True, True, (SlotState("m", 1, "ready", "", each),)) for each in (well, ill, well)]
    assert folded(tuple(reports)).find("m", "").running == ill
    assert folded(tuple(reports[:1])).find("m", "").running == well


def test_reports_are_unchanged_by_json() -> None:
    told = Report(True, True, (SlotState("m", 1, "ready", "", running()), SlotState("m", 2, "loading", "loading")))
    assert Report.from_json(json.loads(json.dumps(told._asdict()))) == told


def test_a_slot_is_found_by_name_and_version_or_the_newest() -> None:
    whole = folded((report("ready", "unavailable"),))
    assert (whole.find("m", "").version, whole.find("m", "1").version) == (2, 1)
    with pytest.raises(NotFound):
        whole.find("m", "3")


# --- a worker's registry ----------------------------------------------------------------------------------------------


def registry(server: State, own: State = "ready") -> WorkerRegistry:
    """Return a registry of one model, in state ``server`` in all workers together and in ``own`` in this one."""
    state = ServerState()
    state.fold([Report(True, server == "ready", (SlotState("echo", 1, server, "a reason"),))], [("echo", 1)])
    made = WorkerRegistry(LoopbackRegistry([LoopbackModel(state=own)]))
    made.receive(json.loads(json.dumps(state.to_json())))
    return made


@pytest.mark.parametrize(
    ("server", "own", "ready"),
    [
        ("ready", "ready", True),
        ("loading", "ready", False),
        ("unavailable", "ready", False),
        ("ready", "loading", False),
    ],
)
def test_a_model_is_ready_if_it_is_in_this_worker_and_in_all(server: State, own: State, ready: bool) -> None:
    found = registry(server, own)
    assert (found.ready, found.is_ready("echo", "")) == (ready, ready)
    if own == "ready":
        with leased(found.acquire, "echo", "") as model:
            assert model.name == "echo", "it serves, whatever the others do"


def test_subscribers_get_changes_of_this_worker_and_of_all() -> None:
    own, heard = LoopbackRegistry([LoopbackModel()]), list[bool]()
    registry = WorkerRegistry(own)
    assert not registry.is_ready("echo", ""), "the supervisor has not reported yet"
    registry.subscribe(lambda: heard.append(registry.is_ready("echo", "")))
    registry.receive({"ready": True, "models": [["echo", 1]]})
    own.change(own.models()[0], "unavailable")
    assert heard == [True, False]
