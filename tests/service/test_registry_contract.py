"""The contract of every registry (``bf16kit.service.contract.Registry``): the production one and the one of the tests.

A transport test proves nothing if its registry behaves differently from the production one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from artifacts import write_mlp
from beginning import leased
from controlled import Controlled
from loopback import LoopbackModel, LoopbackRegistry
from waiting import until

from bf16kit.messages.errors import InvalidRequest, NotFound, RequestError, Unavailable
from bf16kit.service.contract import Registry, State, infer
from bf16kit.service.models import loading
from bf16kit.service.request import Request
from bf16kit.service.telemetry.metrics import Metrics

States = Mapping[tuple[str, int], State]


@dataclass
class World:
    """A registry with slots in the requested states. ``drain`` drains it; ``stop`` makes its first slot not ready."""

    registry: Registry
    drain: Callable[[], None]
    stop: Callable[[], object]


Make = Callable[[States], World]


@pytest.fixture
def loopback() -> Iterator[Make]:
    def build(states: States) -> World:
        models = [LoopbackModel(name, version=version, state=state) for (name, version), state in states.items()]
        registry = LoopbackRegistry(models)
        for model in models:
            model.batcher.start()
        opened.extend(models)
        return World(registry, registry.drain, lambda: registry.change(models[0], "unavailable"))

    opened: list[LoopbackModel] = []
    yield build
    for model in opened:
        model.batcher.close()


@pytest.fixture
def production(tmp_path: Path) -> Iterator[Make]:
    held = threading.Event()
    opened: list[Controlled] = []

    def build(states: States) -> World:
        for (name, version), state in states.items():
            write_mlp(tmp_path / name / str(version), spoil=0.5 if state == "unavailable" else 0)
            (tmp_path / name / "serving.yaml").write_text("version_policy: all\nshadow: {rate: 0}", "utf-8")

        def load_or_wait(path: Path, *given: Any, **more: Any) -> loading.LoadedModel:
            if states[path.parent.name, int(path.name)] == "loading":
                held.wait(60)
            return loading.load(path, *given, **more)

        repository = Controlled(tmp_path, Metrics(), device="cpu", threads=1, load=load_or_wait)
        opened.append(repository)
        repository.scan()
        repository.start()
        until(lambda: {(s.name, s.version): s.state for s in repository.models()} == dict(states))
        return World(repository, repository.drain, lambda: repository.unload(next(iter(states))[0]))

    yield build
    held.set()
    for repository in opened:
        repository.close()


@pytest.fixture(params=["loopback", "production"])
def make(request: pytest.FixtureRequest) -> Make:
    return cast(Make, request.getfixturevalue(request.param))


def refused(call: Callable[[str, str], object], name: str, version: str) -> type[RequestError]:
    with pytest.raises(RequestError) as error:
        call(name, version)
    return error.type


@pytest.mark.long
def test_a_ready_model_can_be_found_acquired_and_run_and_what_is_not_served_is_not_found(make: Make) -> None:
    world = make({("m", 1): "ready"})
    registry = world.registry
    width = registry.get("m", "").inputs[0].shape[1]
    assert isinstance(width, int)
    with leased(registry.acquire, "m", "1") as model:
        reply = infer(model, Request({"x": np.zeros((2, width), np.float32)}, rows=2))
    assert (model.name, model.version) == ("m", 1)
    assert reply.outputs["y"].shape == (2, width)
    assert reply.precision == model.info.precision
    slot = registry.find("m", "")
    assert (slot.name, slot.version, slot.state, slot.reason) == ("m", 1, "ready", "")
    assert slot.model is registry.get("m", "1")
    assert registry.ready
    assert registry.is_ready("m", "")
    for name, version in (("nobody", ""), ("", ""), ("m", "0"), ("m", "2"), ("m", "9" * 5000)):
        for call in (registry.get, registry.find, registry.acquire):
            assert refused(call, name, version) is NotFound
        assert not registry.is_ready(name, version)
    assert registry.versions("nobody") == []
    for version in ("x", "-1", "1.0", " 1", "²"):
        for call in (registry.get, registry.find, registry.acquire):
            assert refused(call, "m", version) is InvalidRequest
        assert refused(registry.is_ready, "m", version) is InvalidRequest


@pytest.mark.long
@pytest.mark.parametrize(("state", "error"), [("loading", Unavailable), ("unavailable", NotFound)])
def test_the_error_for_a_model_that_is_not_ready_depends_on_its_state(
    make: Make, state: State, error: type[RequestError]
) -> None:
    """Unavailable means that the client should try again; NotFound means that it should not."""
    registry = make({("m", 1): state, ("good", 1): "ready"}).registry
    for version in ("", "1"):
        assert refused(registry.get, "m", version) is error
        assert refused(registry.acquire, "m", version) is error
        assert not registry.is_ready("m", version)
    slot = registry.find("m", "1")
    assert (slot.state, slot.model) == (state, None)
    assert slot.reason
    assert not registry.ready
    assert registry.get("good", "").name == "good"


@pytest.mark.long
def test_the_newest_ready_version_serves_and_slots_are_sorted_by_name_and_then_by_version(make: Make) -> None:
    registry = make({("m", 11): "unavailable", ("m", 2): "ready", ("m", 10): "ready", ("a", 9): "ready"}).registry
    assert registry.get("m", "").version == 10
    assert registry.find("m", "").version == 10
    assert registry.get("m", "2").version == 2
    assert registry.versions("m") == [2, 10]
    assert [(slot.name, slot.version) for slot in registry.models()] == [("a", 9), ("m", 2), ("m", 10), ("m", 11)]


@pytest.mark.long
@pytest.mark.parametrize("drains", [True, False])
def test_subscribers_see_a_change_and_a_draining_registry_rejects_requests(make: Make, drains: bool) -> None:
    world = make({("m", 1): "ready"})
    registry, told = world.registry, list[bool]()
    registry.subscribe(lambda: told.append(registry.ready if drains else registry.is_ready("m", "")))
    if not drains:
        world.stop()
        until(lambda: told and not told[-1])
        return
    world.drain()
    assert told == [False]
    assert refused(registry.acquire, "m", "") is refused(registry.get, "m", "1") is Unavailable
    assert not registry.is_ready("m", "")
    assert registry.find("m", "").state == "ready", "it still shows its models"


def test_an_empty_registry_is_live_and_not_ready(make: Make) -> None:
    registry = make({}).registry
    assert not registry.ready
    assert list(registry.models()) == []
