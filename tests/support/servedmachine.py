"""The server under a state machine, and what is compared of it: what serves, what waits, and what is in memory."""

import contextlib
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
import pytest
from beginning import begun
from expectedserving import Expected, Loaded
from hypothesis.stateful import (
    RuleBasedStateMachine,
)
from scriptedengines import WIDTH, Engines, ScriptedRuntime
from waiting import until

from bf16kit.service.config import resources
from bf16kit.service.drift.contract import DriftVerdict
from bf16kit.service.drift.fallbackcontroller import FallbackController
from bf16kit.service.models import loads
from bf16kit.service.models.controller import Controller
from bf16kit.service.models.generation import Generation
from bf16kit.service.models.plan import DesiredModel
from bf16kit.service.models.repository import Repository
from bf16kit.service.request import Reply, Request
from bf16kit.service.telemetry.metrics import Metrics

T = TypeVar("T")
PATIENCE = 20.0  # seconds for what takes milliseconds; a failure is tried again and again to shrink it
NAMES, VERSIONS = ("a", "b"), (1, 2, 3)


class Lease(NamedTuple):
    generation: Generation
    loaded: Loaded


class InFlight(NamedTuple):
    """A request that runs, and the engine on which its run began."""

    lease: Lease
    reply: Future[Reply]
    runtime: ScriptedRuntime


class Measured(NamedTuple):
    """A verdict on a generation. It may be delivered late."""

    verdict: DriftVerdict
    of: Loaded


class ServedMachine(RuleBasedStateMachine):
    """A repository with its threads, and beside it what is expected of each model. Its rules are the subclass's."""

    template: ClassVar[Path]  # of the artifacts

    def __init__(self) -> None:
        super().__init__()
        self.cleanup = contextlib.ExitStack()
        self.root = Path(self.cleanup.enter_context(tempfile.TemporaryDirectory()))
        patched = self.cleanup.enter_context(pytest.MonkeyPatch.context())
        patched.setattr(loads, "PATIENCE_SECONDS", 0.0)  # a change of one model waits for no other's
        patched.setattr(resources, "collect_and_freeze", lambda: None)  # it takes longer than all the rest
        self.threads = set(threading.enumerate())
        self.engines = Engines(self.template)
        self.cleanup.enter_context(self.engines.installed())
        self.now = 0.0
        self.edition = 0
        self.held: list[Lease] = []
        self.in_flight: list[InFlight] = []
        self.late: list[Measured] = []  # verdicts that are to come
        self.warming: list[Loaded] = []  # their references wait in the engine
        self.expected = {name: Expected({}) for name in NAMES}
        self.start()

    def start(self) -> None:
        """Start a server on what the directory holds."""
        self.metrics = Metrics()
        self.applied = self.ended = 0
        self.engines.loads.clear()
        self.expected = {name: Expected(each.disk, each.setting) for name, each in self.expected.items()}
        self.stopping = False
        self.repository = Repository(self.metrics, device="cpu", threads=1)
        self.controller = Controller(
            self.root, self.apply, lambda all_models: {}, "poll", slots=self.repository.models, clock=lambda: 0.0
        )
        self.fallback = FallbackController(self.repository, lambda *key: None, clock=lambda: self.now)
        self.repository.start()

    def apply(self, desired: DesiredModel) -> Future[None]:
        """Pass a wish to the repository; the future ends for the controller before it is counted here."""
        passed: Future[None] = Future()

        def on_done(done: Future[None]) -> None:
            error = done.exception()
            if error is None:
                passed.set_result(None)
            else:
                passed.set_exception(error)
            self.ended += 1

        self.applied += 1
        self.repository.apply(desired).add_done_callback(on_done)
        return passed

    def settle(self) -> None:
        """Wait until the server has done all that it can do, and is as it must be then."""
        if self.stopping:
            return
        for each in self.expected.values():
            each.advance(held=not self.engines.go.is_set())
        until(self.is_still, PATIENCE, self.difference)

    def is_still(self) -> bool:
        return self.found() == self.sought() and self.open_as_expected()

    def difference(self) -> str:
        opened = [(runtime.edition, runtime.info.precision) for runtime in self.engines.open]
        return f"{self.found()} → {self.sought()}, with {opened} open, faults {self.engines.faults}"

    def found(self) -> tuple[object, ...]:
        wishes = self.applied, self.applied - self.ended  # first: the end of a wish may have started a thread
        running = [thread.name for thread in set(threading.enumerate()) - self.threads]
        serving = {
            (slot.name, slot.version): (model.info.note, model.info.kernel, model.active_precision.precision)
            for slot in self.repository.models()
            if (model := slot.model) is not None
        }
        threads = tuple(sum(map(kind, running)) for kind in (is_load, is_reference, is_older))
        return wishes, threads, (len(self.engines.loads), len(self.engines.waiting)), serving

    def sought(self) -> tuple[object, ...]:
        every = self.expected.values()
        loading = sum(each.given_up + each.loading for each in every)
        serving = {
            (name, version): (
                f"edition {loaded.edition}",
                f"load {loaded.load} of {name}",
                "fp32" if loaded.phase == "fp32" else "bf16",
            )
            for name, each in self.expected.items()
            for version, loaded in each.serving.items()
        }
        wishes = sum(each.applied for each in every), sum(each.unfinished for each in every)
        return wishes, (loading, len(self.warming), 0), (sum(each.loads for each in every), loading), serving

    def open_as_expected(self) -> bool:
        """Whether exactly that is in memory which answers, or may still be asked."""
        needed, allowed = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
        for each in self.expected.values():
            for loaded in [*each.serving.values(), *each.closing]:
                have = Counter({(loaded.edition, "bf16-weights"): 1, (loaded.edition, "fp32"): loaded.phase == "fp32"})
                allowed += have + Counter({(loaded.edition, "fp32"): loaded.reference_may_come})
                needed += have if loaded.leases or not loaded.closing else Counter()
        # A run that began in fp32 ends there, though bf16 answers by now.
        begun_on = [kind_of(sent.runtime) for sent in self.in_flight if sent.lease.loaded.phase != "fp32"]
        ending = Counter(kind for kind in begun_on if kind[1] == "fp32")
        found = Counter(map(kind_of, list(self.engines.open)))
        return needed + ending <= found <= allowed + ending

    # --- inside -------------------------------------------------------------------------------------------------------

    def precisions(self, loaded: Loaded) -> set[str]:
        now = {"fp32" if loaded.phase == "fp32" else "bf16"}
        return now | ({"fp32"} if loaded.reference_may_come else set())

    def running(self, lease: Lease) -> list[ScriptedRuntime]:
        load = lease.generation.info.kernel
        return [runtime for runtime in list(self.engines.open) if runtime.info.kernel == load and runtime.running]

    def free(self) -> list[Lease]:
        """Return the leases on whose models no request is held, which another would have to wait for."""
        busy = [sent.lease.loaded for sent in self.in_flight]
        return [lease for lease in self.held if lease.loaded not in busy]

    def answer(self, lease: Lease, mark: float = 0.0) -> Reply:
        return begun(lease.generation.begin, request(mark)).result(20)


def one_of(these: Sequence[T], at: int) -> T:
    return these[at % len(these)]


def request(mark: float) -> Request:
    return Request({"x": np.full((1, WIDTH), mark, np.float32)}, rows=1)


def kind_of(runtime: ScriptedRuntime) -> tuple[int, str]:
    return runtime.edition, runtime.info.precision


def is_load(name: str) -> bool:
    return name == "loading"


def is_reference(name: str) -> bool:
    return name.endswith("-fp32")


def is_older(name: str) -> bool:
    return name == "older-version"
