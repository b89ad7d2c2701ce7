"""When a model that could not be loaded is tried again, and that it then serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from artifacts import write_mlp
from waiting import until

from bf16kit.messages.errors import RuntimeFailure
from service.contract import State
from service.models import loading
from service.models.controller import Controller
from service.models.loads import GIVEN_UP
from service.models.plan import DesiredModel, Plan
from service.models.policy import Serving
from service.models.repository import Repository
from service.models.retries import FIRST_SECONDS, LONGEST_SECONDS, Retries
from service.telemetry.metrics import Metrics
from service.workers.state import SlotState


def desired(*versions: int, stamp: str = "1", broken: str = "") -> DesiredModel:
    return DesiredModel(
        "m", tuple(Plan(version, Path("m") / str(version), Serving(), stamp, broken) for version in versions)
    )


class World:
    """The served slots, and a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.places: list[SlotState] = []
        self.retries = Retries(lambda: self.places, lambda: self.now)

    def put(self, state: State, reason: str = "", version: int = 1) -> None:
        self.places = [SlotState("m", version, state, reason)]

    def due(self, wanted: DesiredModel | None = None, after: float = 0.0) -> bool:
        """Return whether ``wanted`` is due ``after`` seconds later."""
        self.now += after
        wanted = wanted or desired(1)
        return self.retries.due({"m": wanted}) == [wanted]


@pytest.fixture
def world() -> World:
    world = World()
    world.put("unavailable", "the runtime could not load it")
    return world


@pytest.mark.parametrize("before", ["", "the previously loaded version still serves; its replacement failed: "])
def test_a_load_that_was_given_up_is_not_tried_again_until_its_files_change(world: World, before: str) -> None:
    world.put("ready" if before else "unavailable", f"{before}{GIVEN_UP}: opening cpu.onnx took longer than 600 s")
    assert not world.due()
    assert not world.due(after=2 * LONGEST_SECONDS)
    world.put("unavailable", "no memory")
    assert not world.due(desired(1, stamp="2"))
    assert world.due(desired(1, stamp="2"), after=FIRST_SECONDS)


def test_the_pauses_double_and_are_an_hour_at_most(world: World) -> None:
    assert not world.due()  # the first poll finds it
    pause, waited = FIRST_SECONDS, 0.0
    for _ in range(12):
        assert not world.due(after=pause - 1)
        assert world.due(after=1)
        assert not world.due()
        waited += pause
        pause = min(2 * pause, LONGEST_SECONDS)
    assert pause == LONGEST_SECONDS < waited


def test_a_model_whose_replacement_failed_is_tried_again_while_the_old_one_serves(world: World) -> None:
    world.put("ready", "the previously loaded version still serves")
    assert not world.due()
    assert world.due(after=FIRST_SECONDS)


def test_a_version_without_a_slot_is_tried_again(world: World) -> None:
    world.put("ready")
    assert not world.due(desired(1, 2))
    assert world.due(desired(1, 2), after=FIRST_SECONDS)


def test_a_model_is_not_tried_again_while_it_loads_and_its_pauses_keep_growing(world: World) -> None:
    assert not world.due()
    assert world.due(after=FIRST_SECONDS)
    world.put("loading", "loading")
    assert not world.due(after=LONGEST_SECONDS)
    world.put("unavailable", "again")
    assert world.due()
    assert not world.due(after=4 * FIRST_SECONDS - 1)
    assert world.due(after=1)


def test_the_pauses_start_again_after_a_model_served_or_its_files_changed(world: World) -> None:
    assert not world.due()
    assert world.due(after=FIRST_SECONDS)
    world.put("ready")
    assert not world.due(after=LONGEST_SECONDS)
    world.put("unavailable", "a worker that was started again could not load it")
    assert not world.due()
    assert world.due(after=FIRST_SECONDS)
    assert not world.due(desired(1, stamp="2"), after=LONGEST_SECONDS)  # its files have changed: it loads anyway
    assert world.due(desired(1, stamp="2"), after=FIRST_SECONDS)


def test_a_model_whose_serving_yaml_is_invalid_is_not_tried_again(world: World) -> None:
    broken = desired(1, broken="serving.yaml: unknown key 'x'")
    assert not world.due(broken)
    assert not world.due(broken, after=LONGEST_SECONDS)


class Room:
    """Loads a model if ``there`` is true; otherwise there is no room for it."""

    def __init__(self) -> None:
        self.there = False
        self._load = loading.load

    def load(self, *given: Any, **more: Any) -> loading.LoadedModel:
        if not self.there:
            raise RuntimeFailure("no room for weights")
        return self._load(*given, **more)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    room = Room()
    monkeypatch.setattr(loading, "load", room.load)
    return room


@pytest.fixture
def repository(room: Room) -> Iterator[Repository]:
    repository = Repository(Metrics(), device="cpu", threads=1)
    repository.start()
    yield repository
    repository.close()


def test_a_polled_model_serves_once_the_cause_of_its_failed_load_has_passed(
    tmp_path: Path, repository: Repository, room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing changes in the repository."""
    write_mlp(tmp_path / "m" / "1")
    now = 0.0
    control = Controller(
        tmp_path, repository.apply, repository.apply_all, "poll", retries=Retries(repository.models, lambda: now)
    )
    control.apply_initial()
    until(lambda: repository.find("m", "").state == "unavailable")
    room.there = True
    control.poll(lambda: None)
    now = FIRST_SECONDS - 1
    control.poll(lambda: None)
    assert repository.find("m", "").state == "unavailable"
    now += 1
    with caplog.at_level("INFO"):
        control.poll(lambda: None)
    until(lambda: repository.find("m", "").state == "ready")
    assert "model 'm' could not be loaded; trying again" in caplog.text
