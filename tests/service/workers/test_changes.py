"""The models of several workers: changed in all of them, or in none, and answered with one precision."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from bf16kit.messages.errors import ArtifactError, Bf16kitError, Unavailable
from service.config.serverconfig import ServerConfig
from service.contract import State
from service.drift.fallbackcontroller import PrecisionOrder
from service.models.plan import DesiredModel, FailedVersion, Plan
from service.models.serving import Serving
from service.peers.channel import Body, to_json
from service.workers.changes import WorkerModels
from service.workers.fleet import Fleet
from service.workers.state import SlotState

NONE = DesiredModel("m")
DAMAGED = Unavailable("version 2 cannot be loaded")
DIED = Unavailable("worker 2 of this server has ended; try again", "ended")


def desired(*versions: int, name: str = "m", stamp: str = "") -> DesiredModel:
    return DesiredModel(name, tuple(Plan(version, Path("/nowhere"), Serving(), stamp) for version in versions))


class Workers(Fleet):
    """A fleet of three whose processes are not started: each serves what it is told, unless the test has it fail."""

    def __init__(self, directory: Path) -> None:
        super().__init__(ServerConfig(repository=directory, workers=3), 1, {}, lambda worker: None)
        self.up = [worker.name for worker in self.workers]
        self.serves: dict[str, dict[str, DesiredModel]] = {name: {} for name in self.up}
        self.told: list[tuple[str, DesiredModel]] = []
        self.wrong: dict[str, Bf16kitError] = {}  # the error of a worker that is to load something new
        self.held: Future[Body] | None = None  # the answer of all workers on model "m"
        self.remembered: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.asked: dict[str, Future[Body]] = {}  # the answers to an order, by worker

    @property
    def running(self) -> list[str]:
        return self.up

    def ask_to_serve(self, name: str, desired: DesiredModel) -> Future[Body]:
        answer: Future[Body] = Future()
        self.told.append((name, desired))
        if self.held is not None and desired.name == "m":
            return self.held
        if name in self.wrong and desired.plans and desired != self.serves[name].get(desired.name):
            answer.set_exception(self.wrong[name])
        else:
            self.serves[name][desired.name] = desired
            answer.set_result({})
        return answer

    def remember(self, kind: str, name: str, body: Mapping[str, Any]) -> None:
        self.remembered[kind, name] = body

    def forget(self, kind: str, name: str) -> None:
        self.remembered.pop((kind, name), None)

    def ask(
        self, kind: str, body: Mapping[str, Any] | None = None, files: Sequence[int] = ()
    ) -> dict[str, Future[Body]]:
        assert kind == "precision"
        return self.asked

    def all_serve(self) -> list[DesiredModel | None]:
        return [serves.get("m") for serves in self.serves.values()]


@pytest.fixture
def workers(tmp_path: Path) -> Workers:
    return Workers(tmp_path)


@pytest.fixture
def changed() -> list[tuple[str, list[int]]]:
    return []


@pytest.fixture
def changes(workers: Workers, changed: list[tuple[str, list[int]]]) -> Iterator[WorkerModels]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    made = WorkerModels(workers, loop, lambda model, versions: changed.append((model, list(versions))), lambda: 100.0)
    yield made
    made.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_load_is_tried_in_one_worker_and_then_made_in_all(
    workers: Workers, changes: WorkerModels, changed: list[tuple[str, list[int]]]
) -> None:
    changes.apply(desired(1)).result(20)
    assert workers.told == [(f"worker {at}", desired(1)) for at in (1, 2, 3)]
    assert workers.desired_models == {"m": desired(1)}
    assert changed == [("m", [1])]


@pytest.mark.parametrize("error", [DAMAGED, DIED])
@pytest.mark.parametrize(
    ("before", "asked", "reverted"),
    [
        (NONE, desired(1), False),  # its slot says why
        (desired(1), desired(2), False),  # it serves what it did, and its slot says why no more
        (desired(1, 2), desired(2, 3), False),  # version 1 stays there, by the policy latest
        (desired(1), desired(1, 2, 3), True),  # one of the new ones may serve
    ],
)
def test_a_load_that_fails_in_the_first_worker_or_kills_it_reaches_no_other(
    workers: Workers,
    changes: WorkerModels,
    changed: list[tuple[str, list[int]]],
    error: Bf16kitError,
    before: DesiredModel,
    asked: DesiredModel,
    reverted: bool,
) -> None:
    changes.apply(before).result(20)
    served, known = workers.desired_models, list(changed)
    workers.told.clear()
    workers.wrong["worker 1"] = error
    assert changes.apply(asked).exception(20) is error
    assert workers.told == [("worker 1", asked), *([("worker 1", before)] if reverted else [])]
    assert workers.desired_models == served, "a worker that starts now begins with what serves"
    assert changed == known


def test_a_version_that_failed_to_load_is_dropped_once_it_is_no_longer_wanted(
    workers: Workers, changes: WorkerModels
) -> None:
    changes.apply(desired(1)).result(20)
    workers.wrong["worker 1"] = DAMAGED
    assert changes.apply(desired(1, 2)).exception(20) is DAMAGED
    workers.told.clear()
    changes.apply_all([desired(1)])["m"].result(20)
    assert workers.told[0] == ("worker 1", desired(1))


def test_all_workers_revert_a_load_that_fails_in_a_later_one(workers: Workers, changes: WorkerModels) -> None:
    changes.apply(desired(1)).result(20)
    workers.wrong["worker 3"] = DAMAGED
    assert changes.apply(desired(2)).exception(20) is DAMAGED
    assert workers.all_serve() == [desired(1)] * 3
    assert workers.desired_models == {"m": desired(1)}


def test_a_worker_that_dies_during_a_load_does_not_fail_it(workers: Workers, changes: WorkerModels) -> None:
    workers.wrong["worker 2"] = DIED
    changes.apply(desired(1)).result(20)
    assert workers.desired_models == {"m": desired(1)}, "it is started with it"


def test_an_unload_reaches_all_workers(workers: Workers, changes: WorkerModels) -> None:
    changes.apply(desired(1)).result(20)
    changes.apply(NONE).result(20)
    assert workers.all_serve() == [NONE] * 3
    assert workers.desired_models == {}


def test_a_load_without_a_worker_is_unavailable(workers: Workers, changes: WorkerModels) -> None:
    workers.up = []
    assert isinstance(changes.apply(desired(1)).exception(20), Unavailable)


def test_models_set_before_the_start_hold_for_all_and_later_only_changes_are_sent(
    workers: Workers, changes: WorkerModels
) -> None:
    running, workers.up = workers.up, []
    changes.apply_all([desired(1), desired(1, name="other")])
    assert workers.told == []
    assert set(workers.desired_models) == {"m", "other"}
    workers.up = running
    for future in changes.apply_all([desired(1), desired(1, name="new")]).values():
        future.result(20)
    served = {"new": desired(1, name="new"), "other": DesiredModel("other")}
    assert list(workers.serves.values()) == [served] * 3
    assert set(workers.desired_models) == {"m", "new"}


def test_only_versions_with_a_different_plan_are_reported_as_changed(
    changes: WorkerModels, changed: list[tuple[str, list[int]]]
) -> None:
    """The other versions continue, and what is known of them is kept."""
    changes.apply(desired(1, 2)).result(20)
    changes.apply(desired(1, 2)).result(20)
    changes.apply(desired(2, 3)).result(20)
    changes.apply(DesiredModel("m", (*desired(2).plans, *desired(3, stamp="newer").plans))).result(20)
    changes.apply(NONE).result(20)
    assert changed == [("m", [1, 2]), ("m", [1, 3]), ("m", [3]), ("m", [2, 3])]


def test_counts_of_a_version_that_failed_are_kept_until_it_is_gone(
    changes: WorkerModels, changed: list[tuple[str, list[int]]]
) -> None:
    (second,) = desired(2).plans
    instead = DesiredModel("m", desired(1).plans, (FailedVersion(second, "over the budget"),))
    for wanted in (desired(2), instead, desired(3)):
        changes.apply(wanted).result(20)
    assert changed == [("m", [2]), ("m", [1]), ("m", [1, 2, 3])]


def test_changes_that_wait_or_come_when_the_server_stops_are_unavailable(
    workers: Workers, changes: WorkerModels, caplog: pytest.LogCaptureFixture
) -> None:
    workers.held = Future()
    in_progress, waiting = changes.apply(desired(1)), changes.apply(desired(2))
    until(lambda: workers.told, what="the first one's begin")
    changes.close()
    workers.held.set_result({})
    in_progress.result(20)
    for stopped in (waiting, changes.apply(desired(1))):
        with pytest.raises(Unavailable, match="the server is stopping"):
            stopped.result(20)
    assert caplog.text == ""


def test_a_change_that_takes_long_holds_up_only_those_of_its_own_model(workers: Workers, changes: WorkerModels) -> None:
    workers.held = Future()
    long, next_of_it = changes.apply(desired(1)), changes.apply(desired(2))
    for number in range(20):
        changes.apply(desired(1, name=f"other {number}")).result(20)
    assert [each for _, each in workers.told if each.name == "m"] == [desired(1)]
    assert not long.done()
    workers.held.set_result({})
    next_of_it.result(20)
    assert long.done()
    assert workers.desired_models["m"] == desired(2)
    assert len(workers.desired_models) == 21


def test_what_the_workers_begin_with_has_failed_once_it_failed_in_one_and_none_loads_it(
    workers: Workers, changes: WorkerModels
) -> None:
    workers.up = []
    futures = changes.apply_all([desired(1, 2), desired(1, name="old")])

    def report(*states: State) -> None:
        slots = [SlotState("m", 1, states[0]), SlotState("m", 2, states[1], "damaged"), SlotState("old", 1, states[2])]
        workers.state.slots = {slot.key: slot for slot in slots}

    report("loading", "unavailable", "loading")
    with pytest.raises(TimeoutError):
        futures["m"].result(0.5)
    report("ready", "unavailable", "loading")
    assert str(futures["m"].exception(20)) == "model 'm' version 2: damaged"
    assert not futures["old"].done()
    report("ready", "loading", "ready")
    futures["old"].result(20)


def test_what_is_being_tried_or_has_failed_is_not_tried_again_because_another_model_changes(
    workers: Workers, changes: WorkerModels, caplog: pytest.LogCaptureFixture
) -> None:
    changes.apply(desired(1, name="old")).result(20)
    workers.wrong["worker 1"] = DAMAGED
    assert changes.apply_all([desired(1, name="old"), desired(2)])["m"].exception(20) is DAMAGED
    assert "version 2 cannot be loaded" in caplog.text
    workers.wrong.clear()
    assert list(changes.apply_all([desired(2, name="old"), desired(2)])) == ["old"]
    workers.held = Future()
    trying = changes.apply_all([desired(2, name="old"), desired(5)])["m"]
    assert changes.apply_all([desired(2, name="old"), desired(5)]) == {}
    back = changes.apply_all([desired(2, name="old"), desired(2)])["m"]
    workers.held.set_result({})
    trying.result(20)
    back.result(20)
    assert workers.desired_models["m"] == desired(2)


# --- which precision answers ------------------------------------------------------------------------------------------

PLAN = Plan(3, Path("/models/m/3"), Serving(), "stamp")
ORDER = PrecisionOrder("m", 3, PLAN.digest, "fp32", "drift")
KEPT = ("precision", "m/3")
FAILED, GONE = ArtifactError("no residual"), Unavailable("it has ended", "ended")


@pytest.mark.parametrize(
    ("order", "errors", "error", "logged"),
    [
        (ORDER, [None, FAILED], None, "worker 2 cannot switch to fp32: no residual"),  # one is enough
        # A worker that has not loaded the model begins with bf16 anyway.
        (replace(ORDER, precision="bf16"), [None, Unavailable("it is not loaded here")], None, ""),
        (ORDER, [GONE, FAILED], "no residual", "worker 2 cannot switch"),  # not the error of a dead one
        (ORDER, [], "no worker of this server is running", ""),
    ],
)
def test_an_order_ends_when_all_have_answered_and_is_kept_for_later_workers(
    workers: Workers,
    changes: WorkerModels,
    caplog: pytest.LogCaptureFixture,
    order: PrecisionOrder,
    errors: list[Exception | None],
    error: str | None,
    logged: str,
) -> None:
    workers.asked = {f"worker {at}": Future() for at, _ in enumerate(errors, 1)}
    told = changes.order(order)
    for asked, each in reversed(list(zip(workers.asked.values(), errors, strict=True))):
        assert not told.done()
        asked.set_exception(each) if each else asked.set_result({})
    found = told.exception(20)
    assert (None if found is None else str(found)) == error
    assert logged in caplog.text if logged else caplog.text == ""
    assert workers.remembered == {KEPT: to_json(order)}


def test_an_order_holds_for_the_plan_that_answers_until_its_version_changes(
    workers: Workers, changes: WorkerModels
) -> None:
    assert changes.active_plan("m", 3) is None
    fourth = replace(PLAN, version=4)
    changes.apply(DesiredModel("m", (PLAN, fourth))).result(20)
    changes.order(ORDER)
    before = changes.active_plan("m", 3)
    assert before == (PLAN.digest, 100.0, PLAN.serving.fallback)
    changes._clock = lambda: 200.0
    changes.apply(DesiredModel("m", (PLAN, replace(fourth, stamp="newer")))).result(20)
    assert (changes.active_plan("m", 3), set(workers.remembered)) == (before, {KEPT})
    changes.apply(DesiredModel("m", (replace(PLAN, stamp="newer"),))).result(20)
    after = changes.active_plan("m", 3)
    assert after is not None
    assert (after.since, workers.remembered) == (200.0, {})


def test_the_current_and_the_tried_plan_are_both_known_during_a_change(workers: Workers, changes: WorkerModels) -> None:
    rich = Serving(max_dims={"seq": 8}, labels={"y": ("a", "b")}, shadow={"rate": 0.5}, fallback={"policy": "fp32"})  # type: ignore[arg-type]
    tried = replace(PLAN, serving=rich)
    digests = [plan.digest for plan in (PLAN, tried)]

    def known() -> list[Plan | None]:
        return [workers.plan("m", 3, each) for each in digests]

    changes.apply(DesiredModel("m", (PLAN,))).result(20)
    workers.held, workers.told = Future(), []
    trying = changes.apply(DesiredModel("m", (tried,)))
    until(lambda: workers.told, what="the begin")
    assert known() == [PLAN, tried]
    (travelled,) = DesiredModel.from_json(DesiredModel("m", (tried,)).to_json()).plans
    assert workers.plan("m", 3, travelled.digest) == tried, "as a worker says it, who was told"
    assert workers.plan("m", 4, digests[0]) is None
    assert workers.plan("other", 3, digests[0]) is None
    workers.held.set_result({})
    trying.result(20)
    assert known() == [None, tried]
