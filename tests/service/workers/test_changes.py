"""The models of several workers: changed in all of them, or in none, and answered with one precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from service.workers.state import ServerState, SlotState


def desired(*versions: int, name: str = "m", stamp: str = "") -> DesiredModel:
    return DesiredModel(name, tuple(Plan(version, Path("/nowhere"), Serving(), stamp) for version in versions))


class Workers:
    """The part of a fleet that :class:`WorkerModels` uses.

    Each worker serves what it is told, unless the test has it fail.
    """

    def __init__(self, count: int = 3) -> None:
        self.running = [f"worker {number}" for number in range(1, count + 1)]
        self.desired_models: Mapping[str, DesiredModel] = {}
        self.serves: dict[str, dict[str, DesiredModel]] = {name: {} for name in self.running}
        self.told: list[str] = []
        self.wrong: dict[str, Bf16kitError] = {}  # the error of a worker that gets a model with plans
        self.tried: list[DesiredModel | None] = []
        self.state = ServerState()
        self.remembered: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.asked: dict[str, Future[Body]] = {}  # the answers to an order, by worker

    def change(self, desired_models: Mapping[str, DesiredModel]) -> None:
        self.desired_models = dict(desired_models)

    def change_model(self, desired: DesiredModel, trying: DesiredModel | None = None) -> None:
        others = {name: each for name, each in self.desired_models.items() if name != desired.name}
        self.desired_models = {**others, desired.name: desired} if desired.plans else others
        self.tried.append(trying)

    def ask_to_serve(self, name: str, asked: DesiredModel) -> Future[Body]:
        told: Future[Body] = Future()
        self.told.append(name)
        error = self.wrong.get(name)
        if error is not None and asked.plans and asked != self.desired_models.get("old"):
            told.set_exception(error)
        else:
            self.serves[name][asked.name] = asked
            told.set_result({})
        return told

    def remember(self, kind: str, name: str, body: Mapping[str, Any]) -> None:
        self.remembered[kind, name] = body

    def forget(self, kind: str, name: str) -> None:
        self.remembered.pop((kind, name), None)

    def ask(self, kind: str, body: Mapping[str, Any]) -> dict[str, Future[Body]]:
        assert kind == "precision"
        return self.asked

    def all_serve(self) -> list[DesiredModel | None]:
        return [serves.get("m") for serves in self.serves.values()]


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def changed() -> list[tuple[str, list[int]]]:
    return []


@pytest.fixture
def changes(workers: Workers, changed: list[tuple[str, list[int]]]) -> Iterator[WorkerModels]:
    told = lambda model, versions: changed.append((model, list(versions)))  # noqa: E731 -- of two arguments
    made = WorkerModels(workers, told, lambda: 100.0)  # type: ignore[arg-type]
    yield made
    made.close()


DAMAGED = Unavailable("version 2 cannot be loaded")
DIED = Unavailable("worker 2 of this server has ended; try again", "ended")


def test_a_load_is_tried_in_one_worker_and_then_made_in_all(
    workers: Workers, changes: WorkerModels, changed: list[tuple[str, list[int]]]
) -> None:
    changes.apply(desired(1)).result(20)
    assert workers.told == ["worker 1", "worker 2", "worker 3"]
    assert workers.all_serve() == [desired(1)] * 3
    assert workers.desired_models == {"m": desired(1)}
    assert desired(1) in workers.tried, "what is tried is told to be on its way"
    assert changed == [("m", [1])]


def test_a_load_that_fails_in_the_first_worker_reaches_no_other(
    workers: Workers, changes: WorkerModels, changed: list[tuple[str, list[int]]]
) -> None:
    changes.apply(desired(1)).result(20)
    workers.told.clear()
    workers.wrong["worker 1"] = DAMAGED
    assert changes.apply(desired(2)).exception(20) is DAMAGED
    assert workers.told == ["worker 1"], "it serves what it did, and its slot says why no more"
    assert workers.desired_models == {"m": desired(1)}, "who is started now begins with what serves"
    assert changed == [("m", [1])]


def test_the_first_worker_reverts_if_it_fails_to_load_one_of_several_versions(
    workers: Workers, changes: WorkerModels
) -> None:
    changes.apply(desired(1)).result(20)
    workers.told.clear()
    workers.wrong["worker 1"] = DAMAGED
    workers.desired_models = {**workers.desired_models, "old": desired(1)}
    assert changes.apply(desired(1, 2, 3)).exception(20) is DAMAGED
    assert workers.told == ["worker 1", "worker 1"]
    assert workers.serves["worker 1"]["m"] == desired(1)


def test_a_version_that_failed_to_load_is_dropped_once_it_is_no_longer_wanted(
    workers: Workers, changes: WorkerModels
) -> None:
    changes.apply(desired(1)).result(20)
    workers.wrong["worker 1"] = DAMAGED
    workers.desired_models = {**workers.desired_models, "old": desired(1)}
    assert changes.apply(desired(1, 2)).exception(20) is DAMAGED
    workers.told.clear()
    changes.apply_all([desired(1), desired(1, name="old")])
    changes.apply(DesiredModel("no such")).result(20)
    assert workers.told[0] == "worker 1"


def test_all_workers_revert_a_load_that_fails_in_a_later_one(workers: Workers, changes: WorkerModels) -> None:
    changes.apply(desired(1)).result(20)
    workers.wrong["worker 3"] = DAMAGED
    assert changes.apply(desired(2)).exception(20) is DAMAGED
    assert workers.all_serve()[:2] == [desired(1)] * 2
    assert workers.serves["worker 3"]["m"] == desired(1)
    assert workers.desired_models == {"m": desired(1)}


def test_a_worker_that_dies_during_a_load_does_not_fail_it(workers: Workers, changes: WorkerModels) -> None:
    workers.wrong["worker 2"] = DIED
    changes.apply(desired(1)).result(20)
    assert workers.desired_models == {"m": desired(1)}, "it is started with it"


def test_a_load_that_kills_the_first_worker_is_tried_in_no_other(workers: Workers, changes: WorkerModels) -> None:
    workers.wrong["worker 1"] = DIED
    assert changes.apply(desired(1)).exception(20) is DIED
    assert workers.told == ["worker 1"]
    assert workers.desired_models == {}


def test_an_unload_reaches_all_workers_and_a_repeated_load_is_no_change(
    workers: Workers, changes: WorkerModels, changed: list[tuple[str, list[int]]]
) -> None:
    changes.apply(desired(1)).result(20)
    changes.apply(desired(1)).result(20)
    assert changed == [("m", [1])]
    changes.apply(DesiredModel("m")).result(20)
    assert workers.all_serve() == [DesiredModel("m")] * 3
    assert workers.desired_models == {}


def test_a_load_without_a_worker_is_unavailable(workers: Workers, changes: WorkerModels) -> None:
    workers.running = []
    assert isinstance(changes.apply(desired(1)).exception(20), Unavailable)


def test_wishes_from_before_the_start_hold_for_all_and_later_only_changes_are_sent(
    workers: Workers, changes: WorkerModels
) -> None:
    running, workers.running = workers.running, []
    changes.apply_all([desired(1), desired(1, name="other")])
    assert workers.told == []
    assert set(workers.desired_models) == {"m", "other"}
    workers.running = running
    changes.apply_all([desired(1), desired(1, name="new")])
    served = {"new": desired(1, name="new"), "other": DesiredModel("other")}
    until(lambda: all(serves == served for serves in workers.serves.values()))
    until(lambda: set(workers.desired_models) == {"m", "new"})


def test_only_versions_with_a_different_plan_are_reported_as_changed(
    changes: WorkerModels, changed: list[tuple[str, list[int]]]
) -> None:
    """The other versions continue, and what is known of them is kept."""
    changes.apply(desired(1, 2)).result(20)
    changes.apply(desired(2, 3)).result(20)
    changes.apply(DesiredModel("m", (*desired(2).plans, *desired(3, stamp="newer").plans))).result(20)
    changes.apply(DesiredModel("m")).result(20)
    assert changed == [("m", [1, 2]), ("m", [1, 3]), ("m", [3]), ("m", [2, 3])]


def test_changes_that_wait_or_come_when_the_server_stops_are_unavailable(
    workers: Workers, changes: WorkerModels, caplog: pytest.LogCaptureFixture
) -> None:
    changes.apply(desired(1, name="old")).result(20)
    held: Future[Body] = Future()
    workers.ask_to_serve = lambda name, asked: held  # type: ignore[method-assign]
    in_progress, waiting = changes.apply(desired(1)), changes.apply(desired(2))
    until(lambda: desired(1) in workers.tried)
    changes.apply_all([desired(2, name="old")])
    changes.close()
    held.set_result({})
    in_progress.result(20)
    for stopped in (waiting, changes.apply(desired(1))):
        error = stopped.exception(20)
        assert isinstance(error, Unavailable)
        assert "the server is stopping" in str(error)
    assert caplog.text == ""


def test_a_change_that_takes_long_holds_up_only_those_of_its_own_model(workers: Workers, changes: WorkerModels) -> None:
    held: Future[Body] = Future()
    ask = workers.ask_to_serve
    workers.ask_to_serve = lambda name, asked: held if asked.name == "m" else ask(name, asked)  # type: ignore[method-assign]
    long, next_of_it = changes.apply(desired(1)), changes.apply(desired(2))
    for number in range(20):
        changes.apply(desired(1, name=f"other {number}")).result(20)
    assert not long.done()
    assert not next_of_it.done()
    held.set_result({})
    long.result(20)
    next_of_it.result(20)
    assert workers.desired_models["m"] == desired(2)
    assert len(workers.desired_models) == 21


def test_what_the_workers_begin_with_has_failed_once_it_failed_in_one_and_none_loads_it(
    workers: Workers, changes: WorkerModels
) -> None:
    running, workers.running = workers.running, []
    futures = changes.apply_all([desired(1, 2), desired(1, name="old")])
    workers.running = running

    def report(*states: State) -> None:
        slots = [SlotState("m", 1, states[0]), SlotState("m", 2, states[1], "damaged"), SlotState("old", 1, states[2])]
        workers.state.slots = {slot.key: slot for slot in slots}
        workers.state.notify()

    report("loading", "unavailable", "loading")
    assert not any(future.done() for future in futures.values())
    report("ready", "unavailable", "loading")
    assert str(futures["m"].exception(0)) == "model 'm' version 2: damaged"
    assert not futures["old"].done()
    report("ready", "loading", "ready")
    futures["old"].result(0)


def test_a_failed_version_beside_others_that_serve_leaves_them_in_the_first_worker(
    workers: Workers, changes: WorkerModels
) -> None:
    changes.apply(desired(1, 2)).result(20)
    workers.told.clear()
    workers.wrong["worker 1"] = DAMAGED
    workers.desired_models = {**workers.desired_models, "old": desired(1, 2)}
    assert changes.apply(desired(2, 3)).exception(20) is DAMAGED
    assert workers.told == ["worker 1"], "version 1 stays there, by the policy latest"


def test_counts_of_a_version_that_failed_are_kept_until_it_is_gone(
    changes: WorkerModels, changed: list[tuple[str, list[int]]]
) -> None:
    (second,) = desired(2).plans
    instead = DesiredModel("m", desired(1).plans, (FailedVersion(second, "over the budget"),))
    for wanted in (desired(2), instead, desired(3)):
        changes.apply(wanted).result(20)
    assert changed == [("m", [2]), ("m", [1]), ("m", [1, 2, 3])]


def test_what_is_being_tried_or_has_failed_is_not_tried_again_because_another_model_changes(
    workers: Workers, changes: WorkerModels, caplog: pytest.LogCaptureFixture
) -> None:
    changes.apply(desired(1, name="old")).result(20)
    workers.wrong["worker 1"] = DAMAGED
    changes.apply_all([desired(1, name="old"), desired(2)])
    until(lambda: "version 2 cannot be loaded" in caplog.text)
    for version in (2, 3, 4):
        workers.wrong.clear()
        changes.apply_all([desired(version, name="old"), desired(2)])
        until(lambda version=version: workers.desired_models["old"] == desired(version, name="old"))  # type: ignore[misc]
    assert workers.tried.count(desired(2)) == 1
    changes.apply_all([desired(4, name="old"), desired(5)])
    until(lambda: workers.desired_models.get("m") == desired(5))


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
    assert (None if told.exception(0) is None else str(told.exception(0))) == error
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


def test_the_current_and_the_tried_plan_are_both_known_during_a_change(tmp_path: Path) -> None:
    fleet = Fleet(ServerConfig(repository=tmp_path, workers=2), 1, {}, lambda worker: None)
    rich = Serving(max_dims={"seq": 8}, labels={"y": ("a", "b")}, shadow={"rate": 0.5}, fallback={"policy": "fp32"})  # type: ignore[arg-type]
    tried = replace(PLAN, serving=rich)
    digests = [plan.digest for plan in (PLAN, tried)]
    assert fleet.plan("m", 3, digests[0]) is None
    fleet.change_model(DesiredModel("m", (PLAN,)), trying=DesiredModel("m", (tried,)))
    assert [fleet.plan("m", 3, each) for each in digests] == [PLAN, tried]
    (travelled,) = DesiredModel.from_json(DesiredModel("m", (tried,)).to_json()).plans
    assert fleet.plan("m", 3, travelled.digest) == tried, "as a worker says it, who was told"
    assert fleet.plan("m", 4, digests[0]) is None
    assert fleet.plan("other", 3, digests[0]) is None
    fleet.change({"m": DesiredModel("m", (tried,))})
    assert [fleet.plan("m", 3, each) for each in digests] == [None, tried]
    fleet.close()
