"""The repository as a state machine: any order of new files, settings, loads, unloads, leases, drift, and deaths.

The product runs whole, with its threads, on real artifacts; only the sessions are scripted (``scriptedengines``). What
must be true comes from ``expectedserving``. After each step the test waits until the server is as still as it must be.

Breaking one of these is found: a lease that is not counted, a close that does not wait for leases, an engine that is
not stopped, a failed load that withdraws or unloads what serves, the oldest version serves, an unwanted reference is
left open. More examples also find: fp32 survives a reload of the same plan, a late verdict counts, a switch closes
beneath a run.
"""

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from beginning import begun
from expectedserving import RETRY_S, STAY_S, Files, Setting, Wish
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from machinesettings import machine_settings
from scriptedengines import FATAL, HELD, Kind, write_template
from servedmachine import NAMES, PATIENCE, VERSIONS, InFlight, Lease, Measured, ServedMachine, one_of, request
from waiting import until

from bf16kit.messages.errors import NotFound, RuntimeFailure, Unavailable
from bf16kit.service.drift.contract import DriftVerdict
from bf16kit.service.models.plan import DesiredModel

OVER = DriftVerdict("", 0, "over", "rounding", "y", "relative_l2", 1.5, 1.2, 1.8, 300.0, 400)
WITHIN = DriftVerdict("", 0, "within", "none", "y", "relative_l2", 0.5, 0.4, 0.6, 300.0, 400)
names, versions, places = st.sampled_from(NAMES), st.sampled_from(VERSIONS), st.integers(0, 5)
usually = st.sampled_from([True, True, True, False])
kinds: st.SearchStrategy[Kind] = st.sampled_from(["good", "good", "good", "damaged", "failing"])
valid_settings = st.builds(
    Setting,
    st.sampled_from(["{latest: 1}", "{latest: 2}", "{latest: 1, strict: true}", "all"]),
    st.sampled_from(["fp32", "fp32", "fp32", "alert", "off"]),
    st.sampled_from([128, 256]),
    st.just(False),
)
any_settings = valid_settings | valid_settings | valid_settings | st.just(Setting(broken=True))


class Served(ServedMachine):
    # --- life ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Drain and close the server: what is leased answers until it is released, and nothing is left."""
        self.stopping = True
        for loaded in self.warming:
            loaded.reference_may_come = True  # before the close reaches it, or not
        self.repository.drain()
        for name in NAMES:
            with pytest.raises((NotFound, Unavailable)):
                self.repository.acquire(name, "")
        assert not self.repository.ready
        with ThreadPoolExecutor(1) as closer:
            closing = closer.submit(self.repository.close, 60)
            self.engines.go.set()
            self.engines.references_go.set()
            while self.in_flight:
                self.let_go(0, running=True)
            while self.held:
                self.ask(0, dies=False)
                self.let_go(0, running=False)
            assert closing.result(60), "nothing was left behind"
        self.warming.clear()
        until(lambda: not self.engines.open, PATIENCE, lambda: f"closing {self.engines.open}")
        until(lambda: set(threading.enumerate()) <= self.threads, PATIENCE, lambda: str(threading.enumerate()))
        assert b'model="' not in self.metrics.expose()[0]
        assert isinstance(self.repository.apply(DesiredModel("a")).exception(0), Unavailable)
        assert self.engines.faults == []

    def teardown(self) -> None:
        try:
            if not self.stopping:  # else it is a stop that has failed
                self.stop()
        finally:
            self.engines.go.set()
            self.engines.references_go.set()
            self.cleanup.close()

    # --- the directory ------------------------------------------------------------------------------------------------

    @initialize(setting=valid_settings, fallen=st.booleans(), slow=st.booleans(), leased=st.booleans(), sent=usually)
    def begin(self, setting: Setting, fallen: bool, slow: bool, leased: bool, sent: bool) -> None:
        """Begin with a server at work: hypothesis leaves out most rules in most examples."""
        for name in NAMES:
            self.configure(name, setting, polled=False)
            self.write(name, 1, "good", polled=True)
        if slow:
            self.engines.references_go.clear()
        if fallen:
            self.measure(0, OVER, late=False)
        if leased:
            self.acquire("a", "")
        if sent:
            self.acquire("a", "1")
            self.send(-1)

    @precondition(lambda self: self.engines.go.is_set())
    @rule(name=names, version=versions, kind=kinds, polled=usually)
    def write(self, name: str, version: int, kind: Kind, polled: bool) -> None:
        self.edition += 1
        self.engines.write(self.root / name / str(version), self.edition, kind)
        self.expected[name].disk[version] = Files(self.edition, kind)
        if polled:
            self.poll()

    @precondition(lambda self: self.engines.go.is_set() and any(each.disk for each in self.expected.values()))
    @rule(at=places, polled=usually)
    def remove(self, at: int, polled: bool) -> None:
        name, version = one_of([(n, v) for n, each in self.expected.items() for v in each.disk], at)
        shutil.rmtree(self.root / name / str(version))
        del self.expected[name].disk[version]
        if polled:
            self.poll()

    @rule(name=names, setting=any_settings, polled=usually)
    def configure(self, name: str, setting: Setting, polled: bool) -> None:
        (self.root / name).mkdir(exist_ok=True)
        (self.root / name / "serving.yaml").write_text(setting.text, "utf-8")
        self.expected[name].setting = setting
        if polled:
            self.poll()

    # --- what is wanted -----------------------------------------------------------------------------------------------

    @rule()
    def poll(self) -> None:
        self.bound_given_up()
        self.controller.poll(lambda: None)
        for each in self.expected.values():
            wish = each.wish() if each.disk else Wish()
            if wish != (each.wanted or Wish()):
                each.apply(wish)
        self.settle()

    @rule(name=names, wanted=st.booleans())
    def control(self, name: str, wanted: bool) -> None:
        """A client asks for a load or an unload."""
        self.bound_given_up()
        each = self.expected[name]
        if not wanted:
            self.controller.unload(name)
            if each.wanted is not None and each.wanted.versions:
                each.apply(Wish())
        elif each.disk:
            self.controller.load(name)
            each.apply(each.wish(loads_older=False))
        else:
            with pytest.raises(NotFound):
                self.controller.load(name)
        self.settle()

    @rule()
    def hold_or_release_loads(self) -> None:
        if self.engines.go.is_set():
            self.engines.go.clear()
            return
        self.engines.go.set()
        for each in self.expected.values():
            each.given_up = 0
        self.settle()

    def bound_given_up(self) -> None:
        """A server that has given up four loads begins no more: that is not what this machine is about."""
        if sum(each.given_up for each in self.expected.values()) >= 2:
            self.hold_or_release_loads()

    @rule()
    def die(self) -> None:
        """The server ends, and another one starts on the same directory."""
        self.stop()
        self.start()
        self.poll()

    # --- requests -----------------------------------------------------------------------------------------------------

    @rule(name=names, version=st.sampled_from(["", "", "", *map(str, VERSIONS)]))
    def acquire(self, name: str, version: str) -> None:
        """The version that is asked for answers, or the newest one that is ready."""
        serving = self.expected[name].serving
        wanted = int(version) if version else max(serving, default=0)
        if wanted not in serving:
            with pytest.raises((NotFound, Unavailable)):
                self.repository.acquire(name, version)
            return
        lease = Lease(self.repository.acquire(name, version), serving[wanted])
        assert (lease.generation.name, lease.generation.version) == (name, wanted)
        lease.loaded.leases += 1
        self.held.append(lease)

    def release(self, lease: Lease) -> None:
        lease.generation.release()
        lease.loaded.leases -= 1
        self.settle()

    @precondition(lambda self: self.free())
    @rule(at=places, dies=st.booleans())
    def ask(self, at: int, dies: bool) -> None:
        """A leased model answers, whatever has happened to it: with its own files, in the precision in force.

        If its engine dies, that request fails, and nothing else.
        """
        lease = one_of(self.free(), at)
        if dies:
            with pytest.raises(RuntimeFailure):
                self.answer(lease, FATAL)
            return
        reply = self.answer(lease)
        assert (reply.outputs["y"] == lease.loaded.edition).all()
        assert reply.reported_precision in self.precisions(lease.loaded)

    @precondition(lambda self: self.free())
    @rule(at=places)
    def send(self, at: int) -> None:
        """A request begins to run, on the engine in force, and holds the lease until it is over."""
        lease = one_of(self.free(), at)
        self.held.remove(lease)
        reply = begun(lease.generation.begin, request(HELD))
        until(lambda: self.running(lease))
        (runtime,) = self.running(lease)
        assert runtime.info.precision.removesuffix("-weights") in self.precisions(lease.loaded)
        self.in_flight.append(InFlight(lease, reply, runtime))

    @precondition(lambda self: self.in_flight or self.held)
    @rule(at=places, running=st.booleans())
    def let_go(self, at: int, running: bool) -> None:
        """A request that runs is answered by the engine on which it began; or an idle lease is released."""
        if not self.in_flight or (self.held and not running):
            lease = one_of(self.held, at)
            self.held.remove(lease)
            self.release(lease)
            return
        sent = one_of(self.in_flight, at)
        sent.runtime.go.set()
        reply = sent.reply.result(20)
        assert (reply.outputs["y"][0, 0], reply.precision) == (sent.lease.loaded.edition, sent.runtime.info.precision)
        sent.runtime.go.clear()
        self.in_flight.remove(sent)
        self.release(sent.lease)

    # --- drift --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(each.serving for each in self.expected.values()))
    @rule(at=places, found=st.sampled_from([OVER, OVER, WITHIN]), late=st.sampled_from([False, False, False, True]))
    def measure(self, at: int, found: DriftVerdict, late: bool) -> None:
        """A verdict changes the generation that it is on."""
        name, version, loaded = one_of([(n, v, g) for n, e in self.expected.items() for v, g in e.serving.items()], at)
        active = self.repository.active_plan(name, version)
        assert active is not None
        verdict = replace(found, model=name, version=version, plan=active.plan, at=time.monotonic())
        self.late.append(Measured(verdict, loaded))
        if not late:
            self.receive(-1)

    @precondition(lambda self: self.late)
    @rule(at=places)
    def receive(self, at: int) -> None:
        """A verdict that comes late changes no other generation."""
        measured = one_of(self.late, at)
        self.late.remove(measured)
        self.fallback.receive(measured.verdict)
        loaded, verdict = measured.of, measured.verdict
        if self.expected[verdict.model].serving.get(verdict.version) is loaded:
            if verdict.state == "within":
                loaded.within(self.now)
            elif loaded.over(self.now):
                self.warming.append(loaded)
                self.warm()
        self.settle()

    @rule(seconds=st.sampled_from([STAY_S, RETRY_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.fallback.maintain()
        self.settle()

    @rule(fail=st.sampled_from([False, False, False, True]))
    def hold_or_release_references(self, fail: bool) -> None:
        """Those that wait are loaded, or cannot be."""
        if self.engines.references_go.is_set():
            self.engines.references_go.clear()
            return
        self.engines.references_fail = fail
        self.engines.references_go.set()
        self.warm()
        self.settle()

    def warm(self) -> None:
        if self.engines.references_go.is_set():
            for loaded in self.warming:
                if not loaded.closing:
                    loaded.warmed(self.now, failed=self.engines.references_fail)
            self.warming.clear()

    # --- what must be true --------------------------------------------------------------------------------------------

    @invariant()
    def each_slot_is_as_expected(self) -> None:
        assert self.engines.faults == []
        for name, each in self.expected.items():
            assert self.repository.versions(name) == sorted(each.serving)
            for version in VERSIONS:
                assert self.repository.is_ready(name, str(version)) == (version in each.serving)
            slots = [slot for slot in self.repository.models() if slot.name == name]
            if each.settled:
                assert all(slot.state != "loading" for slot in slots)
                if each.wanted is None or not each.wanted.versions:
                    assert slots == [], "nothing serves after an unload"
            if each.serving:
                assert self.repository.get(name, "").version == max(each.serving)


@pytest.fixture(scope="module", autouse=True)
def template(tmp_path_factory: pytest.TempPathFactory) -> None:
    Served.template = write_template(tmp_path_factory.mktemp("template") / "mlp" / "1")


def test_any_order_of_changes_leaves_what_was_asked_for() -> None:
    run_state_machine_as_test(Served, settings=machine_settings(0.3))


@pytest.mark.long
def test_any_long_order_of_changes_leaves_what_was_asked_for() -> None:
    run_state_machine_as_test(Served, settings=machine_settings(2.0, in_ci=0.5))
