"""Older versions serve in place of versions that cannot be loaded, and failed loads are tried again."""

import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from controlled import write_model
from waiting import until

from bf16kit.messages.errors import RuntimeFailure, Unavailable
from bf16kit.service.contract import State
from bf16kit.service.models import loading
from bf16kit.service.models.controller import RETRY_SECONDS, Controller, Mode
from bf16kit.service.models.loads import GIVEN_UP
from bf16kit.service.models.plan import DesiredModel, FailedVersion, Plan, desired_model_of, with_serving
from bf16kit.service.models.repository import Repository
from bf16kit.service.models.rollouts import Rollouts, has_failed
from bf16kit.service.models.serving import Serving, VersionPolicy
from bf16kit.service.telemetry.metrics import Metrics
from bf16kit.service.workers.state import SlotState

BAD = 0.5
ONLY_1 = VersionPolicy(specific=(1,))
Versions = dict[int, float]  # by version: how much its outputs are spoiled


class Server:
    """A repository, its controller in a mode, and the loads so far."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 1000.0
        self.loads: list[str] = []
        self.metrics = Metrics()
        self.has_room = True
        self.repository = Repository(self.metrics, device="cpu", threads=1, load=self._load)
        self.control: Controller

    def _load(self, path: Path, *given: Any, **more: Any) -> loading.LoadedModel:
        self.loads.append(f"{path.parent.name}/{path.name}")
        if not self.has_room:
            raise RuntimeFailure("no room for weights")
        return loading.load(path, *given, **more)

    def start(self, mode: Mode = "none", *start_up: str) -> None:
        slots = self.repository.models
        self.control = Controller(
            self.root, self.repository.apply, self.repository.apply_all, mode, start_up, slots, lambda: self.now
        )
        self.control.apply_initial()
        self.repository.start()

    def poll(self) -> None:
        self.control.poll(lambda: None)

    @property
    def states(self) -> dict[int, str]:
        return {slot.version: slot.state for slot in self.repository.models() if slot.name == "m"}

    @property
    def reason(self) -> str:
        return self.repository.find("m", "1").reason

    def wait(self, states: dict[int, str]) -> None:
        until(lambda: self.states == states, what=f"{states}")

    def exposes(self, series: str) -> bool:
        return series in self.metrics.expose()[0].decode().splitlines()


def put(root: Path, versions: Versions, policy: str = "{latest: 1}", name: str = "m") -> None:
    """Write these versions in place of any existing ones."""
    for version, spoil in versions.items():
        write_model(root, name, version, serving=f"shadow: {{rate: 0}}\nversion_policy: {policy}\n", spoil=spoil)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.repository.close()


@pytest.mark.long
def test_after_a_start_the_newest_version_that_passes_serves(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, {1: 0, 2: 0, 3: BAD, 4: BAD})
    (tmp_path / "m" / "2" / "manifest.json").unlink()  # it may still be being copied
    server.start()
    server.wait({1: "ready", 3: "unavailable", 4: "unavailable"})
    until(lambda: server.repository.ready)
    assert server.loads == ["m/4", "m/3", "m/1"], "each only once the newer one has failed"
    assert server.repository.is_ready("m", "")
    assert server.repository.get("m", "").version == 1
    reason = server.repository.find("m", "4").reason
    assert reason.startswith("golden samples are over the drift budget")
    assert reason.endswith("; version 1 serves instead")
    until(lambda: "model 'm': version 4 cannot be loaded: golden samples are over" in caplog.text)
    for series in (
        'golden_gate_passed{model="m",version="4"} 0.0',
        'golden_gate_runs_total{model="m",outcome="failed",version="4"} 1.0',
        'model_ready{model="m",version="4"} 0.0',
        'golden_gate_passed{model="m",version="1"} 1.0',
        'model_ready{model="m",version="1"} 1.0',
    ):
        assert server.exposes(f"bf16kit_{series}")


@pytest.mark.long
def test_a_version_that_was_asked_for_by_number_has_no_substitute(tmp_path: Path, server: Server) -> None:
    put(tmp_path, {1: 0, 2: BAD}, "{specific: [2]}")
    put(tmp_path, {1: 0}, name="other")
    server.start()
    until(lambda: server.repository.is_ready("other", ""))
    assert (server.states, server.loads) == ({2: "unavailable"}, ["m/2", "other/1"])
    assert not server.repository.ready


@pytest.mark.long
def test_a_version_that_failed_in_another_process_is_withdrawn_here(tmp_path: Path, server: Server) -> None:
    put(tmp_path, {1: 0, 2: 0})
    server.repository.start()
    newest = desired_model_of(tmp_path / "m")
    server.repository.apply(newest).result(60)
    older = with_serving(newest, newest.plans[0].serving.model_copy(update={"version_policy": ONLY_1})).plans
    instead = DesiredModel("m", older, (FailedVersion(newest.plans[0], "worker 2: no memory"),))
    server.repository.apply(instead).result(60)
    assert server.states == {1: "ready", 2: "unavailable"}
    assert server.repository.find("m", "2").reason == "worker 2: no memory; version 1 serves instead"
    assert server.repository.ready
    assert server.exposes('bf16kit_model_replacement_failed{model="m",version="2"} 0.0')
    assert server.exposes('bf16kit_model_ready{model="m",version="2"} 0.0')


def desired(*versions: int, stamp: str = "1", broken: str = "") -> DesiredModel:
    return DesiredModel(
        "m", tuple(Plan(version, Path("m") / str(version), Serving(), stamp, broken) for version in versions)
    )


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({}, True),
        ({1: ("ready", "")}, False),
        ({1: ("unavailable", "no memory")}, True),
        ({1: ("loading", "loading")}, False),
        ({1: ("ready", "the previously loaded version still serves; its replacement failed: no memory")}, True),
        ({1: ("unavailable", f"{GIVEN_UP}: opening cpu.onnx took longer than 600 s")}, False),
        ({1: ("ready", f"the previously loaded version still serves; its replacement failed: {GIVEN_UP}")}, False),
    ],
)
def test_a_load_is_tried_again_if_its_cause_may_have_passed(
    states: dict[int, tuple[State, str]], expected: bool
) -> None:
    slots = {version: SlotState("m", version, *found) for version, found in states.items()}
    assert has_failed(desired(1), slots) is expected
    assert not has_failed(desired(1, broken="serving.yaml: unknown key 'x'"), slots)
    assert has_failed(desired(1, 2), slots) is (expected or states == {1: ("ready", "")}), "2 has no slot"


def test_a_polled_model_serves_once_the_cause_of_its_failed_load_has_passed(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing changes in the repository."""
    put(tmp_path, {1: 0})
    server.has_room = False
    server.start("poll")
    server.wait({1: "unavailable"})
    server.has_room = True
    server.poll()
    server.now += RETRY_SECONDS
    with caplog.at_level("INFO"):
        server.poll()
    server.wait({1: "ready"})
    assert "model 'm' could not be loaded; trying again" in caplog.text


def test_pauses_between_tries_grow_though_a_load_takes_longer_than_a_poll(
    tmp_path: Path,
) -> None:
    put(tmp_path, {1: 0})
    now, took = 0.0, 40.0
    begun: list[float] = []

    def apply(desired: DesiredModel) -> Future[None]:
        begun.append(now)
        return Future()

    def slots() -> list[SlotState]:
        loading = begun and now - begun[-1] < took
        return [SlotState("m", 1, "loading") if loading else SlotState("m", 1, "unavailable", "over the budget")]

    control = Controller(
        tmp_path, apply, lambda start: {each.name: Future() for each in start}, "poll", (), slots, lambda: now
    )
    control.apply_initial()
    while len(begun) < 4:
        control.poll(lambda: None)
        now += 10
    assert [after - before for before, after in itertools.pairwise(begun)] == [
        RETRY_SECONDS * factor for factor in (2, 4, 8)
    ]


def test_a_desired_model_is_the_same_after_it_was_written_and_read() -> None:
    serving = Serving.model_validate(
        {
            "max_batch_size": 4,
            "version_policy": {"specific": [1, 4]},
            "warmup": [1, 4],
            "shadow": {"rate": 0.5},
            "fallback": {"policy": "fp32", "clean_samples": 50},
            "budget": {"relative_l2": None, "max_abs": 0.1},
        }
    )
    plans = (
        Plan(1, Path("/models/m/1"), serving, "stamp"),
        Plan(4, Path("/models/m/4"), Serving(), "", "a reason ≠ ascii"),
    )
    for desired in (
        DesiredModel("m", plans),
        DesiredModel("gone"),
        DesiredModel("m", plans[:1], (FailedVersion(plans[1], "over the budget"),)),
    ):
        written = desired.to_json()
        assert DesiredModel.from_json(written) == desired
        assert isinstance(json.loads(written), dict)
    assert [plan.finished for plan in plans] == [True, False]


@pytest.mark.long
@pytest.mark.parametrize("policy", ["{latest: 2}", "{specific: [2, 3]}"])
def test_a_version_that_serves_stays_when_a_newer_one_fails(tmp_path: Path, server: Server, policy: str) -> None:
    put(tmp_path, {1: 0, 2: 0}, "{latest: 2}")
    server.start("poll")
    server.wait({1: "ready", 2: "ready"})
    before = [server.repository.get("m", version) for version in "12"]
    put(tmp_path, {3: BAD}, policy)
    server.poll()
    server.wait({1: "ready", 2: "ready", 3: "unavailable"})
    until(lambda: server.repository.find("m", "3").reason.endswith("; versions 1, 2 serve instead"))
    if policy == "{latest: 2}":  # else their settings have changed
        assert [server.repository.get("m", version) for version in "12"] == before
        assert server.loads == ["m/1", "m/2", "m/3"]


def test_nothing_is_served_in_place_of_what_failed_and_is_no_longer_wanted() -> None:
    lock, applied, futures = threading.RLock(), list[DesiredModel](), list[Future[None]]()

    def apply(desired: DesiredModel) -> Future[None]:
        applied.append(desired)
        futures.append(Future())
        return futures[-1]

    slots = [SlotState("m", 1, "ready")]
    rollouts = Rollouts(apply, lambda start: {}, lambda: slots, lambda tried: desired(1).plans, lock)
    rollouts.apply(desired(1))
    rollouts.apply(desired(2))
    with lock:  # as whoever changes what is wanted holds it
        futures[-1].set_exception(Unavailable("version 2 cannot be loaded"))
        rollouts.apply(desired(3))
    until(lambda: "older-version" not in {thread.name for thread in threading.enumerate()})
    assert applied == [desired(1), desired(2), desired(3)]


@pytest.mark.long
def test_a_client_that_asks_for_a_load_is_told_and_no_older_version_is_loaded(tmp_path: Path, server: Server) -> None:
    put(tmp_path, {1: 0, 2: BAD})
    put(tmp_path, {1: 0, 2: BAD}, name="at_start")
    server.start("explicit", "at_start")
    until(lambda: server.repository.is_ready("at_start", "1"))
    server.loads.clear()
    assert isinstance(server.control.load("m").exception(60), Unavailable)
    put(tmp_path, {1: 0}, name="other")
    server.control.load("other").result(60)
    assert server.loads == ["m/2", "other/1"]
    assert server.states == {2: "unavailable"}
