"""A worker reports as ready only what is ready in all workers."""

from __future__ import annotations

import pytest
from loopback import LoopbackModel, LoopbackRegistry

from service.contract import State
from service.workers.registry import LatestView, MergedRegistry
from service.workers.view import SlotState, View


def whole(state: State, *, ready: bool = True, own: State = "ready") -> MergedRegistry:
    """Return a registry of one model, in ``state`` in all workers together and in ``own`` in this one."""
    sight = LatestView()
    sight.change(View(ready, {("echo", 1): SlotState("echo", 1, state, "worker 2 is being started")}))
    return MergedRegistry(LoopbackRegistry([LoopbackModel(state=own)]), sight)


def test_a_model_that_is_ready_in_all_workers_is_ready() -> None:
    registry = whole("ready")
    assert registry.ready
    assert registry.is_ready("echo", "")
    assert [slot.state for slot in registry.models()] == ["ready"]


@pytest.mark.parametrize("state", ["loading", "unavailable"])
def test_a_model_not_ready_in_another_worker_is_not_ready_but_serves(state: State) -> None:
    registry = whole(state, ready=False)
    assert not registry.ready
    assert not registry.is_ready("echo", "1")
    (slot,) = registry.models()
    assert (slot.state, slot.reason) == (state, "worker 2 is being started")
    with registry.acquire("echo", "") as model:
        assert model.name == "echo"


def test_a_model_not_ready_in_this_worker_is_not_ready_whatever_the_last_report() -> None:
    registry = whole("ready", own="loading")
    assert not registry.ready
    assert not registry.is_ready("echo", "")
    assert [slot.state for slot in registry.models()] == ["loading"]


def test_a_model_the_supervisor_has_not_reported_yet_is_not_ready() -> None:
    registry = MergedRegistry(LoopbackRegistry([LoopbackModel()]), LatestView())
    assert not registry.is_ready("echo", "")


def test_subscribers_get_changes_of_this_worker_and_of_all() -> None:
    own, sight, heard = LoopbackRegistry([LoopbackModel()]), LatestView(), list[str]()
    MergedRegistry(own, sight).subscribe(lambda: heard.append("news"))
    sight.change(View())
    own.change(own.models()[0], "unavailable")
    assert heard == ["news", "news"]
