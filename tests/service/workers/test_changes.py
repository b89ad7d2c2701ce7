"""The models of several workers: changed in all of them, or in none, and answered with one precision."""

import asyncio
import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from bf16kit.messages.errors import ArtifactError, Bf16kitError, Unavailable
from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.contract import State
from bf16kit.service.drift.fallbackcontroller import PrecisionOrder
from bf16kit.service.models import loads
from bf16kit.service.models.plan import DesiredModel, FailedVersion, Plan
from bf16kit.service.models.rollouts import Rollouts
from bf16kit.service.models.serving import Serving, VersionPolicy
from bf16kit.service.peers.channel import Body, to_json
from bf16kit.service.peers.peer import died
from bf16kit.service.workers.changes import WorkerModels
from bf16kit.service.workers.fleet import Fleet
from bf16kit.service.workers.state import Report, SlotState

NONE = DesiredModel("m")
DAMAGED = Unavailable("version 2 cannot be loaded")
DIED = Unavailable("worker 2 of this server has ended; try again", "ended")


def desired(*versions: int, name: str = "m", stamp: str = "", serving: Serving | None = None) -> DesiredModel:
    return DesiredModel(
        name, tuple(Plan(version, Path("/nowhere"), serving or Serving(), stamp) for version in versions)
    )


Changed = list[tuple[str, list[int]]]  # what was reported: a model and its versions


class Workers(Fleet):
    """A fleet of three whose processes are not started: each serves what it is told, unless the test has it fail.

    All of them serve a model "base", too.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(ServerConfig(repository=directory, workers=3), 1, {}, lambda worker: None)
        self.up = [worker.name for worker in self.workers]
        self.serves: dict[str, dict[str, DesiredModel]] = {name: {} for name in self.up}
        self.told: list[tuple[str, DesiredModel]] = []
        self.wrong: dict[str, Exception] = {}  # the error of a worker that is to load something new
        self.damaged = frozenset(range(100))  # the new versions that such a worker cannot load
        self.slots = {name: [SlotState("base", 1, "ready")] for name in self.up}
        self.report()
        self.hangs: DesiredModel | None = None  # never loaded
        self.held: Future[Body] | None = None  # the answer of all workers on model "m"
        self.remembered: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.asked: dict[str, Future[Body]] = {}  # the answers to an order, by worker

    @property
    def running(self) -> list[str]:
        return self.up

    def ask_to_serve(self, name: str, desired: DesiredModel) -> Future[Body]:
        answer: Future[Body] = Future()
        self.told.append((name, desired))
        if desired == self.hangs:
            return answer
        if self.held is not None and desired.name == "m":
            return self.held
        before = self.serves[name].get(desired.name, DesiredModel(desired.name))
        if name in self.wrong and any(
            plan not in before.plans and plan.version in self.damaged for plan in desired.plans
        ):
            if not died(self.wrong[name]):
                self._load(name, desired, self.damaged - before.versions, before.versions)
            answer.set_exception(self.wrong[name])
        else:
            self.serves[name][desired.name] = desired
            self._load(name, desired)
            answer.set_result({})
        return answer

    def _load(
        self, name: str, desired: DesiredModel, damaged: Collection[int] = (), kept: Collection[int] = ()
    ) -> None:
        """Set the slots of a worker as it reports them."""
        others = [each for each in self.slots[name] if each.name != desired.name or each.version in kept]
        new = [
            SlotState(desired.name, each, *(("unavailable", "damaged") if each in damaged else ("ready",)))
            for each in sorted(desired.versions - set(kept))
        ]
        self.slots[name] = [*others, *new]
        self.report()

    def report(self) -> None:
        """Fold what all workers serve into the state of the server."""
        for index, (name, slots) in enumerate(self.slots.items()):
            self._report(index, Report(True, True, tuple(slots)) if name in self.up else None)

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
def changed() -> Changed:
    return []


@pytest.fixture
def now() -> list[float]:
    """Return the time in seconds that the clock shows, for a test to set."""
    return [100.0]


@pytest.fixture
def changes(workers: Workers, changed: Changed, now: list[float]) -> Iterator[WorkerModels]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    made = WorkerModels(workers, loop, lambda model, versions: changed.append((model, list(versions))), lambda: now[0])
    yield made
    made.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_load_is_tried_in_one_worker_and_then_made_in_all(
    workers: Workers, changes: WorkerModels, changed: Changed
) -> None:
    changes.apply(desired(1)).result(20)
    assert workers.told == [(f"worker {at}", desired(1)) for at in (1, 2, 3)]
    assert (workers.desired_models, changed) == ({"m": desired(1)}, [("m", [1])])
    changes.apply(NONE).result(20)  # an unload reaches all
    assert (workers.all_serve(), workers.desired_models) == ([NONE] * 3, {})


@pytest.mark.parametrize("error", [DAMAGED, DIED])
@pytest.mark.parametrize(
    ("before", "asked"),
    [(NONE, desired(1)), (desired(1), desired(2)), (desired(1, 2), desired(2, 3)), (desired(1), desired(1, 2, 3))],
)
def test_a_load_that_fails_in_the_first_worker_or_kills_it_reaches_no_other(
    workers: Workers,
    changes: WorkerModels,
    changed: Changed,
    error: Exception,
    before: DesiredModel,
    asked: DesiredModel,
) -> None:
    """It serves what it did, and its slots say why no more."""
    changes.apply(before).result(20)
    served, known = workers.desired_models, list(changed)
    workers.told.clear()
    workers.wrong["worker 1"] = error
    assert changes.apply(asked).exception(20) is error
    assert workers.told == [("worker 1", asked)]
    assert workers.desired_models == served, "a worker that starts now begins with what serves"
    new = [plan for plan in asked.plans if plan not in before.plans]
    assert [workers.plan("m", plan.version, plan.digest) for plan in new] == [None] * len(new), "nothing is tried"
    assert changed == known


def test_a_version_that_failed_to_load_is_dropped_once_it_is_no_longer_wanted(
    workers: Workers, changes: WorkerModels
) -> None:
    changes.apply(desired(1)).result(20)
    workers.wrong["worker 1"] = DAMAGED
    assert changes.apply(desired(1, 2)).exception(20) is DAMAGED
    workers.told.clear()
    changes.apply(desired(1)).result(20)
    assert workers.told[0] == ("worker 1", desired(1))


ALL, TWO = VersionPolicy(all=True), VersionPolicy(specific=(2, 3))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("before", "policy", "asked", "damaged", "served"),
    [(NONE, ALL, (1, 2), 2, (1,)), (desired(1), TWO, (2, 3), 3, (1, 2))],
)
def test_a_damaged_version_among_new_ones_takes_no_other_with_it(
    workers: Workers,
    changes: WorkerModels,
    first: bool,
    before: DesiredModel,
    policy: VersionPolicy,
    asked: tuple[int, ...],
    damaged: int,
    served: tuple[int, ...],
) -> None:
    """All workers serve the others, and tell why that one is not served."""
    rollouts = Rollouts(changes.apply, changes.apply_all, workers.state.models, lambda tried: (), threading.RLock())
    if before.plans:
        rollouts.apply(before).result(20)
    workers.wrong["worker 1" if first else "worker 3"] = DAMAGED
    workers.damaged = frozenset({damaged})
    wanted = desired(*asked, serving=Serving(version_policy=policy))
    assert DAMAGED.args[0] in str(rollouts.apply(wanted).exception(20))
    until(lambda: None not in workers.all_serve() and all(each.failed for each in workers.all_serve() if each))
    for each in workers.all_serve():
        assert each is not None
        assert each.versions == set(served)
        assert [(one.plan.version, one.reason) for one in each.failed] == [(damaged, "damaged")]
    assert workers.desired_models["m"] == workers.all_serve()[0]


@pytest.mark.parametrize("error", [DAMAGED, OSError(24, "Too many open files")])
@pytest.mark.parametrize("worker", ["worker 1", "worker 3"])
def test_all_workers_revert_a_load_that_fails_in_one(
    workers: Workers, changes: WorkerModels, caplog: pytest.LogCaptureFixture, error: Exception, worker: str
) -> None:
    changes.apply(desired(1)).result(20)
    workers.wrong[worker] = error
    failed = changes.apply(desired(2)).exception(20)
    assert isinstance(failed, Bf16kitError)
    assert str(error) in str(failed)
    assert f"model 'm': {failed}" in caplog.text
    assert (worker in str(failed)) is (worker == "worker 3" or isinstance(error, OSError))
    assert workers.all_serve() == [desired(1)] * 3
    assert workers.desired_models == {"m": desired(1)}


def test_a_worker_that_dies_during_a_load_does_not_fail_it(workers: Workers, changes: WorkerModels) -> None:
    workers.wrong["worker 2"] = DIED
    changes.apply(desired(1)).result(20)
    assert workers.desired_models == {"m": desired(1)}, "it is started with it"


@pytest.mark.parametrize("dying", [False, True])
def test_a_change_while_no_worker_serves_is_what_they_begin_with(
    workers: Workers, changes: WorkerModels, dying: bool
) -> None:
    """Else a change that cures what ends them at every start would not reach them."""
    up, workers.up, workers.slots = workers.up, [], {}
    started = changes.apply_all([desired(1, stamp="too large"), desired(1, name="other")])
    assert set(workers.desired_models) == {"m", "other"}
    if dying:  # of what it began with
        workers.up, workers.wrong["worker 1"] = ["worker 1"], DIED
        workers.slots["worker 1"] = []
    workers.report()
    future = changes.apply(desired(1))
    until(lambda: workers.desired_models["m"] == desired(1), what="the change")
    workers.slots, workers.up = {name: [SlotState("m", 1, "loading")] for name in up}, up
    workers.report()
    with pytest.raises(TimeoutError):
        future.result(0.5)
    workers.slots = {name: [SlotState("m", 1, "ready"), SlotState("other", 1, "ready")] for name in up}
    workers.report()
    future.result(20)
    started["other"].result(20)
    assert "is being changed again instead" in str(started["m"].exception(20))


NEWER = DesiredModel("m", (*desired(2).plans, *desired(3, stamp="newer").plans))
FAILED_SECOND = DesiredModel("m", desired(1).plans, (FailedVersion(desired(2).plans[0], "over the budget"),))


@pytest.mark.parametrize(
    ("wanted", "reported"),
    [
        ([desired(1, 2), desired(1, 2), desired(2, 3), NEWER, NONE], [[1, 2], [1, 3], [3], [2, 3]]),
        ([desired(2), FAILED_SECOND, desired(3)], [[2], [1], [1, 2, 3]]),  # counts of one that failed stay until then
    ],
)
def test_only_versions_with_a_different_plan_are_reported_as_changed(
    changes: WorkerModels, changed: Changed, wanted: list[DesiredModel], reported: list[list[int]]
) -> None:
    """The other versions continue, and what is known of them is kept."""
    for each in wanted:
        changes.apply(each).result(20)
    assert changed == [("m", versions) for versions in reported]


def test_changes_that_wait_or_come_when_the_server_stops_are_unavailable(
    workers: Workers, changes: WorkerModels, caplog: pytest.LogCaptureFixture
) -> None:
    workers.held = Future()
    in_progress = changes.apply(desired(1))
    until(lambda: workers.told, what="the first one's begin")
    waiting = changes.apply(desired(2))
    changes.close()
    workers.held.set_result({})
    in_progress.result(20)
    for stopped in (waiting, changes.apply(desired(1))):
        with pytest.raises(Unavailable, match="the server is stopping"):
            stopped.result(20)
    assert caplog.text == ""


@pytest.mark.parametrize("worker", ["worker 1", "worker 3"])
def test_a_worker_that_stops_is_no_error_of_a_model(
    workers: Workers, changes: WorkerModels, caplog: pytest.LogCaptureFixture, worker: str
) -> None:
    workers.wrong[worker] = Unavailable("the server is shutting down", "draining")
    error = changes.apply(desired(1)).exception(20)
    assert isinstance(error, Unavailable)
    assert (error.reason, caplog.text) == ("draining", "")


def test_a_change_that_takes_long_holds_up_only_those_of_its_own_model(workers: Workers, changes: WorkerModels) -> None:
    workers.held = Future()
    long = changes.apply(desired(1))
    until(lambda: workers.told, what="its begin")
    next_of_it = changes.apply(desired(2))
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
    assert str(futures["m"].exception(20)) == "model 'm': version 2 cannot be loaded: damaged"
    assert not futures["old"].done()
    report("ready", "loading", "ready")
    futures["old"].result(20)


def test_a_repository_put_back_while_a_change_is_being_loaded_is_followed(
    workers: Workers, changes: WorkerModels
) -> None:
    rollouts = Rollouts(changes.apply, changes.apply_all, workers.state.models, lambda tried: (), threading.RLock())
    rollouts.apply(desired(1)).result(20)
    workers.held, workers.told = Future(), []
    rollouts.replace_all([desired(2)])
    until(lambda: workers.told, what="the begin")
    rollouts.replace_all([desired(2)])
    rollouts.replace_all([desired(1)])
    workers.held.set_result({})
    until(lambda: workers.told[-3:] == [(f"worker {at}", desired(1)) for at in (1, 2, 3)], what="the way back")
    until(lambda: workers.desired_models["m"] == desired(1))
    assert len(workers.told) == 6


def test_a_change_that_is_not_wanted_any_more_is_not_begun_and_holds_up_the_next_for_a_while_only(
    workers: Workers, changes: WorkerModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "PATIENCE_SECONDS", 0.01)
    workers.hangs = desired(1)
    hanging = changes.apply(desired(1))
    until(lambda: workers.told, what="the begin")
    with pytest.raises(TimeoutError):
        hanging.result(0.5)  # nothing else is wanted yet
    monkeypatch.setattr(loads, "PATIENCE_SECONDS", math.inf)
    never, last = changes.apply(desired(2)), changes.apply(desired(3))
    monkeypatch.setattr(loads, "PATIENCE_SECONDS", 0.01)
    last.result(20)
    for superseded in (hanging, never):
        assert "is being changed again instead" in str(superseded.exception(20))
    told = [("worker 1", desired(1)), ("worker 1", NONE), *((f"worker {at}", desired(3)) for at in (1, 2, 3))]
    assert workers.told == told


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
    workers: Workers, changes: WorkerModels, now: list[float]
) -> None:
    assert changes.active_plan("m", 3) is None
    fourth = replace(PLAN, version=4)
    changes.apply(DesiredModel("m", (PLAN, fourth))).result(20)
    changes.order(ORDER)
    before = changes.active_plan("m", 3)
    assert before == (PLAN.digest, 100.0, PLAN.serving.fallback)
    now[0] = 200.0
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
