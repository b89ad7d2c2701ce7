"""Changes of models where several workers serve: in all of them, or in none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from bf16kit.errors import Bf16kitError, Unavailable
from service.models.plan import Plan, Wish
from service.models.policy import Serving
from service.peers.channel import Body
from service.workers.changes import ModelChanges


def wish(*versions: int, name: str = "m", stamp: str = "") -> Wish:
    return Wish(name, tuple(Plan(version, Path("/nowhere"), Serving(), stamp) for version in versions))


class Workers:
    """What :class:`ModelChanges` sees of a fleet. Each worker serves what it is told, but where a test has it fail."""

    def __init__(self, count: int = 3) -> None:
        self.running = [f"worker {number}" for number in range(1, count + 1)]
        self.wishes: Mapping[str, Wish] = {}
        self.serves: dict[str, dict[str, Wish]] = {name: {} for name in self.running}
        self.told: list[str] = []
        self.wrong: dict[str, Bf16kitError] = {}  # what a worker meets that is told of a wish with plans
        self.tried: list[Wish | None] = []

    def change(self, wishes: Mapping[str, Wish], trying: Wish | None = None) -> None:
        self.wishes = dict(wishes)
        self.tried.append(trying)

    def ask_one(self, name: str, kind: str, body: Mapping[str, Any]) -> Future[Body]:
        assert kind == "want"
        told: Future[Body] = Future()
        asked = Wish.from_json(body["wish"])
        self.told.append(name)
        error = self.wrong.get(name)
        if error is not None and asked.plans and asked != self.wishes.get("old"):
            told.set_exception(error)
        else:
            self.serves[name][asked.name] = asked
            told.set_result({})
        return told

    def all_serve(self) -> list[Wish | None]:
        return [serves.get("m") for serves in self.serves.values()]


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def changed() -> list[tuple[str, list[int]]]:
    return []


@pytest.fixture
def changes(workers: Workers, changed: list[tuple[str, list[int]]]) -> Iterator[ModelChanges]:
    told = lambda model, versions: changed.append((model, list(versions)))  # noqa: E731 -- of two arguments
    made = ModelChanges(workers, told)  # type: ignore[arg-type]
    yield made
    made.close()


DAMAGED = Unavailable("version 2 cannot be loaded")
DIED = Unavailable("worker 2 of this server has ended; try again", "ended")


def test_a_load_is_tried_in_one_worker_and_then_made_in_all(
    workers: Workers, changes: ModelChanges, changed: list[tuple[str, list[int]]]
) -> None:
    changes.want(wish(1)).result(20)
    assert workers.told == ["worker 1", "worker 2", "worker 3"]
    assert workers.all_serve() == [wish(1)] * 3
    assert workers.wishes == {"m": wish(1)}
    assert wish(1) in workers.tried, "what is tried is told to be on its way"
    assert changed == [("m", [1])]


def test_where_the_first_cannot_the_others_never_hear_of_it(
    workers: Workers, changes: ModelChanges, changed: list[tuple[str, list[int]]]
) -> None:
    changes.want(wish(1)).result(20)
    workers.told.clear()
    workers.wrong["worker 1"] = DAMAGED
    assert changes.want(wish(2)).exception(20) is DAMAGED
    assert workers.told == ["worker 1"], "it serves what it did, and its slot says why no more"
    assert workers.wishes == {"m": wish(1)}, "who is started now begins with what serves"
    assert changed == [("m", [1])]


def test_of_several_versions_the_first_may_have_loaded_some_and_goes_back(
    workers: Workers, changes: ModelChanges
) -> None:
    changes.want(wish(1)).result(20)
    workers.told.clear()
    workers.wrong["worker 1"] = DAMAGED
    workers.wishes = {**workers.wishes, "old": wish(1)}
    assert changes.want(wish(1, 2, 3)).exception(20) is DAMAGED
    assert workers.told == ["worker 1", "worker 1"]
    assert workers.serves["worker 1"]["m"] == wish(1)


def test_a_version_that_could_not_be_loaded_is_forgotten_when_it_is_wanted_no_more(
    workers: Workers, changes: ModelChanges
) -> None:
    changes.want(wish(1)).result(20)
    workers.wrong["worker 1"] = DAMAGED
    workers.wishes = {**workers.wishes, "old": wish(1)}
    assert changes.want(wish(1, 2)).exception(20) is DAMAGED
    workers.told.clear()
    changes.desire([wish(1), wish(1, name="old")])
    changes.want(Wish("no such")).result(20)
    assert workers.told[0] == "worker 1"


def test_where_another_cannot_all_go_back(workers: Workers, changes: ModelChanges) -> None:
    changes.want(wish(1)).result(20)
    workers.wrong["worker 3"] = DAMAGED
    assert changes.want(wish(2)).exception(20) is DAMAGED
    assert workers.all_serve()[:2] == [wish(1)] * 2
    assert workers.serves["worker 3"]["m"] == wish(1)
    assert workers.wishes == {"m": wish(1)}


def test_a_model_that_was_new_is_unloaded_where_another_cannot_follow(workers: Workers, changes: ModelChanges) -> None:
    workers.wrong["worker 3"] = DAMAGED
    assert changes.want(wish(1)).exception(20) is DAMAGED
    assert workers.all_serve() == [Wish("m")] * 3
    assert workers.wishes == {}


def test_one_that_dies_meanwhile_has_no_say(workers: Workers, changes: ModelChanges) -> None:
    workers.wrong["worker 2"] = DIED
    changes.want(wish(1)).result(20)
    assert workers.wishes == {"m": wish(1)}, "it is started with it"


def test_a_load_that_kills_the_first_worker_is_tried_in_no_other(workers: Workers, changes: ModelChanges) -> None:
    workers.wrong["worker 1"] = DIED
    assert changes.want(wish(1)).exception(20) is DIED
    assert workers.told == ["worker 1"]
    assert workers.wishes == {}


def test_an_unload_is_told_to_all_and_a_load_of_what_is_served_forgets_no_counts(
    workers: Workers, changes: ModelChanges, changed: list[tuple[str, list[int]]]
) -> None:
    changes.want(wish(1)).result(20)
    changes.want(wish(1)).result(20)
    assert changed == [("m", [1])]
    changes.want(Wish("m")).result(20)
    assert workers.all_serve() == [Wish("m")] * 3
    assert workers.wishes == {}


def test_without_a_worker_a_load_says_so(workers: Workers, changes: ModelChanges) -> None:
    workers.running = []
    assert isinstance(changes.want(wish(1)).exception(20), Unavailable)


def test_what_is_desired_before_anybody_runs_is_what_all_begin_with_and_later_only_differences_are_told(
    workers: Workers, changes: ModelChanges
) -> None:
    running, workers.running = workers.running, []
    changes.desire([wish(1), wish(1, name="other")])
    assert workers.told == []
    assert set(workers.wishes) == {"m", "other"}
    workers.running = running
    changes.desire([wish(1), wish(1, name="new")])
    changes.want(Wish("no such")).result(20)  # after all of it: they are made one after another
    assert set(workers.wishes) == {"m", "new"}
    assert workers.serves["worker 2"] == {
        "new": wish(1, name="new"),
        "other": Wish("other"),
        "no such": Wish("no such"),
    }


def test_only_the_versions_that_are_served_otherwise_are_told_to_be_changed(
    changes: ModelChanges, changed: list[tuple[str, list[int]]]
) -> None:
    """The others go on: what is known of them stays known."""
    changes.want(wish(1, 2)).result(20)
    changes.want(wish(2, 3)).result(20)
    changes.want(Wish("m", (*wish(2).plans, *wish(3, stamp="newer").plans))).result(20)
    changes.want(Wish("m")).result(20)
    assert changed == [("m", [1, 2]), ("m", [1, 3]), ("m", [3]), ("m", [2, 3])]
