"""What the owner of the fallback sees of several workers, and how their results are combined."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bf16kit.messages.errors import ArtifactError, Unavailable
from service.config.serverconfig import ServerConfig
from service.drift.fallbackcontroller import PrecisionOrder
from service.models.plan import DesiredModel, Plan
from service.models.serving import Serving
from service.peers.peer import ENDED
from service.workers.fleet import Fleet
from service.workers.processes import WorkerProcesses

PLAN = Plan(3, Path("/models/m/3"), Serving(), "stamp")
ORDER = PrecisionOrder("m", 3, PLAN.digest, "fp32", "drift")
BF16 = replace(ORDER, precision="bf16", reason="")


class AskedFleet(Fleet):
    """A fleet without running workers: the test completes the requests to them."""

    asked: dict[str, Future[Any]]

    def ask(self, kind: str, body: Mapping[str, Any] | None = None) -> dict[str, Future[Any]]:
        assert (kind, body) in [("switch", order.to_json()) for order in (ORDER, BF16)]
        return self.asked

    @property
    def told(self) -> list[tuple[str, str]]:
        """The orders that a newly started worker receives."""
        return list(self._state)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[AskedFleet]:
    fleet = AskedFleet(ServerConfig(repository=tmp_path, workers=2), 1)
    fleet.asked = {"worker 1": Future(), "worker 2": Future()}
    yield fleet
    fleet.close()


def test_the_plan_that_answers_is_the_wanted_one_since_its_last_change(fleet: AskedFleet) -> None:
    now = 100.0
    workers = WorkerProcesses(fleet, lambda: now)
    assert workers.active_plan("m", 3) is None
    fleet.change({"m": DesiredModel("m", (PLAN,))})
    first = workers.active_plan("m", 3)
    assert first is not None
    assert (first.plan, first.policy) == (PLAN.digest, PLAN.serving.fallback)
    assert workers.active_plan("m", 4) is None
    workers.changed("m", [3])
    second = workers.active_plan("m", 3)
    assert second is not None
    assert second.since == now
    assert second != first, "another generation, if by the same plan"


def test_one_worker_that_can_switch_is_enough_and_one_that_cannot_is_logged(
    fleet: AskedFleet, caplog: pytest.LogCaptureFixture
) -> None:
    told = WorkerProcesses(fleet).order(ORDER)
    with caplog.at_level(logging.ERROR):
        fleet.asked["worker 2"].set_exception(ArtifactError("no residual"))
        assert not told.done(), "the other may need longer"
        fleet.asked["worker 1"].set_result({})
    assert told.result(0) is None
    assert "worker 2 cannot switch to fp32: no residual" in caplog.text


def test_a_worker_that_has_not_loaded_the_model_is_no_error_for_bf16(
    fleet: AskedFleet, caplog: pytest.LogCaptureFixture
) -> None:
    told = WorkerProcesses(fleet).order(BF16)
    with caplog.at_level(logging.ERROR):
        fleet.asked["worker 2"].set_exception(Unavailable("model 'm' version 3 is not loaded here"))
        fleet.asked["worker 1"].set_result({})
    assert told.result(0) is None
    assert caplog.text == ""


def test_if_no_worker_can_switch_the_error_is_not_that_of_a_dead_worker(fleet: AskedFleet) -> None:
    told = WorkerProcesses(fleet).order(ORDER)
    fleet.asked["worker 1"].set_exception(Unavailable("it has ended", ENDED))
    fleet.asked["worker 2"].set_exception(ArtifactError("no residual"))
    with pytest.raises(ArtifactError, match="no residual"):
        told.result(0)


def test_an_order_without_a_worker_fails_and_is_kept_for_later_workers(fleet: AskedFleet) -> None:
    fleet.asked = {}
    with pytest.raises(Unavailable, match="no worker"):
        WorkerProcesses(fleet).order(ORDER).result(0)
    assert fleet.told == [("precision", "m/3")]


def test_an_order_is_dropped_when_its_version_changes(fleet: AskedFleet) -> None:
    workers = WorkerProcesses(fleet)
    workers.order(ORDER)
    fleet.remember("precision", "other/m/3", {})
    workers.changed("m", [3])
    assert fleet.told == [("precision", "other/m/3")]


def test_a_version_that_did_not_change_keeps_its_order(fleet: AskedFleet) -> None:
    workers = WorkerProcesses(fleet, lambda: 100.0)
    fleet.change({"m": DesiredModel("m", (PLAN, replace(PLAN, version=4)))})
    workers.order(ORDER)
    before = workers.active_plan("m", 3)
    workers.changed("m", [4])
    assert workers.active_plan("m", 3) == before
    assert fleet.told == [("precision", "m/3")], "a worker that is started now answers as the others do"
    changed = workers.active_plan("m", 4)
    assert changed is not None
    assert changed.since == 100.0


def test_the_current_and_the_tried_plan_are_both_wanted_during_a_change(fleet: AskedFleet) -> None:
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
