"""Inject faults into models and references of a running server; check what detects them, how soon, and the reaction.

One server has a model for each fault and one healthy model; a real Prometheus scrapes it. ``make bench-drift`` writes
the results of these tests into docs/drift.md, with more requests before each fault.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import faults
import faultymodels
import numpy as np
import prometheusprocess
import pytest
from artifacts import write_greedy
from drifttable import LONG, Row, listed, named, record
from faultymodels import rows
from loopback import infer_request
from prometheusprocess import Prometheus
from serverprocess import ServerProcess
from waiting import repeating, until
from workerprocesses import Client, pids

from bf16kit.artifact.artifact import Artifact
from bf16kit.numerics.tensors import Array
from bf16kit.runtime.loading import load_reference
from bf16kit.runtime.ort import kernel
from bf16kit.service.drift.sampler import QUEUE_SIZE

pytestmark = [
    pytest.mark.skipif(
        not kernel.configured_kernel().path, reason="weights that are read as stored need the CPU kernel"
    ),
    pytest.mark.skipif(
        prometheusprocess.find() is None, reason="no prometheus on PATH (Debian: apt-get install prometheus)"
    ),
]
SHADOW = "bf16kit.service.shadow.references"
SERVING = "shadow: {rate: 1, max_per_second: 1000}\nfallback: {policy: fp32, min_stay_seconds: 600}\n"
HEALTHY = 300 if LONG else 32  # requests before a fault
PATIENCE_S = 1200 if LONG else 60  # until an alert fires: the longest `for:` of the rules as shipped is ten minutes
MOST = 200  # samples until a fault is detected: the documented limit for the smallest fault
STEP = 1 if LONG else 8  # requests between two looks at the metrics: the shadow may need a second for one, or for all
_seeds = count(1000)


class Stand(NamedTuple):
    """The state that the tests share. ``repository`` holds a model for each fault."""

    server: ServerProcess
    prometheus: Prometheus
    repository: Path
    client: Client

    def metric(self, name: str, model: str, **labels: str) -> float:
        told = {**labels, "model": model, "version": "1"}
        listed = ",".join(f'{key}="{told[key]}"' for key in sorted(told))
        return self.server.metric(f"bf16kit_{name}{{{listed}}}")

    def ask(self, model: str, x: Array) -> tuple[str, dict[str, Array]]:
        """Return the precision of the response, and the outputs."""
        response = self.client.call("ModelInfer", infer_request(model, x=x), timeout=60)
        shape = (len(x), faultymodels.WIDTH)
        raw = zip(response.outputs, response.raw_output_contents, strict=True)
        outputs = {told.name: np.frombuffer(content, np.float32).reshape(shape) for told, content in raw}
        return response.parameters["precision"].string_param, outputs

    def measure(self, model: str, times: int, scale: float = 1.0) -> None:
        """Send requests of one row until ``times`` of them are measured, and wait until the metric counts them."""
        for start in range(0, times, QUEUE_SIZE):
            before, some = self.measured(model), min(QUEUE_SIZE, times - start)
            for _ in range(some):
                self.ask(model, rows(1, next(_seeds), scale))
            until(lambda before=before, some=some: self.measured(model) >= before + some)  # type: ignore[misc]

    def measured(self, model: str) -> float:
        return self.metric("drift_samples_total", model, outcome="measured")

    def alerts(self, model: str) -> set[str]:
        found = self.prometheus.query(f'ALERTS{{alertstate="firing",model="{model}"}}')
        return {each["alertname"] for each in found}

    def fired(self, model: str, since: float) -> str:
        """Return the alerts that have fired for the model since then, a Unix time, for the table. There are some."""
        alerts: dict[str, float] = {}

        def found() -> bool:  # the newest second is not complete yet
            fired = self.prometheus.fired(since)
            alerts.update({alert: seconds for (alert, of), seconds in fired.items() if of == model})
            return bool(alerts)

        until(found, what="the time of an alert")
        return named(alerts)

    def is_well(self, model: str) -> None:
        """Assert that no alert fires.

        Bf16ReferenceDown may fire at first: Prometheus may have scraped while the reference loaded.
        """
        assert self.alerts(model) <= {"Bf16ReferenceDown"}
        until(lambda: self.alerts(model) == set(), 30, "no alert")

    def causes(self, model: str) -> set[str]:
        text = self.server.get("/metrics")[1]
        return set(re.findall(rf'^bf16kit_drift_cause{{cause="(\w+)",model="{model}",version="1"}} 1\.0$', text, re.M))


@pytest.fixture(scope="module")
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    run = " ".join(item.name for item in request.session.items)
    scratch = tmp_path_factory.mktemp("faults")
    repository = scratch / "repository"
    sound = faultymodels.convert(repository, "sound", scratch / "source")
    write_greedy(repository / "large" / "1", width=faultymodels.WIDTH)
    for name in ("scaled", "starved", "unreadable"):
        faultymodels.copied(sound, repository, name)
    for seed, name in enumerate(("flipped", "swapped", "slowly"), 1):  # own weights: the test finds them by their bytes
        if name in run:  # a conversion takes seconds
            faultymodels.convert(repository, name, scratch / name, seed)
    for damage in (faultymodels.accumulated_in_bf16, faultymodels.cancelling, faultymodels.not_a_number):
        faultymodels.damaged(sound, repository, damage.__name__, damage)
    for directory in repository.iterdir():
        (directory / "serving.yaml").write_text(SERVING, "utf-8")
    server = ServerProcess("--grpc-port", "0", "--http-port", "0", "--repository", str(repository))
    try:
        server.wait_ready()
        with Prometheus(server.ports()[1], scratch / "prometheus", at_once=not LONG) as prometheus:
            client = Client(server.target)
            with client.channel:
                yield Stand(server, prometheus, repository, client)
    finally:
        server.close()


class Seen(NamedTuple):
    """How a fault was detected. ``samples``: the requests measured from the start of the fault until its detection."""

    samples: int
    over: bool  # the drift is over its budget; if False, the change detector raised the alarm
    causes: set[str]


def until_seen(stand: Stand, model: str, inject: Callable[[int], None], scale: float = 1.0) -> Seen:
    """Send requests of one row until the fault is detected. Call ``inject`` before each request, with its number."""
    before = stand.measured(model)
    for number in range(1, MOST + 1):
        inject(number)
        stand.ask(model, rows(1, next(_seeds), scale))
        if number % STEP:
            continue
        until(lambda number=number: stand.measured(model) >= before + number)  # type: ignore[misc]
        changed = max(stand.metric("drift_change_score", model, output=output) for output in ("y", "z"))
        over = stand.metric("drift_over_budget", model) == 1
        causes = stand.causes(model)
        if over or changed >= 1 or causes == {"out_of_range"}:
            return Seen(number, over, causes)
    raise AssertionError(f"{model}: not seen in {MOST} samples")


def falls_back(stand: Stand, model: str, scale: float, inject: Callable[[int], None]) -> None:
    """Send requests until fp32 serves, and check that its outputs equal the reference's."""
    numbers = count(MOST)

    def fallen() -> bool:
        inject(next(numbers))
        return stand.ask(model, rows(1, next(_seeds), scale))[0] == "fp32"

    until(fallen, 60, "fp32 answers")
    x = rows(4, next(_seeds), scale)
    expected = load_reference(Artifact.open(stand.repository / model / "1"), threads=1).run({"x": x})
    _, answered = stand.ask(model, x)
    for name, y in expected.items():
        np.testing.assert_allclose(answered[name], y, rtol=1e-4, atol=1e-5)
    until(lambda: stand.metric("fallback_active", model) == 1)
    until(lambda: "Bf16FallbackActive" in stand.alerts(model), PATIENCE_S, "the alert")
    assert stand.server.get("/readyz")[0] == 200


def no_fault(number: int) -> None:
    """Inject nothing: the fault is in the artifact or in the request."""


def in_memory(stand: Stand, model: str, damage: Callable[[int, list[bytes]], object]) -> Callable[[int], None]:
    """Return a function that damages the model's weights once, in the memory of the server."""
    stored = [faults.stored(stand.repository / model / "1", name) for name in ("b", "c")]

    def inject(number: int) -> None:
        if number == 1:
            damage(stand.server.process.pid, stored)

    return inject


def flipped(stand: Stand) -> Callable[[int], None]:
    return in_memory(stand, "flipped", lambda process, stored: faults.flip(process, stored[0], every=1021))


def swapped(stand: Stand) -> Callable[[int], None]:
    return in_memory(stand, "swapped", lambda process, stored: faults.swap(process, *stored))


def slowly(stand: Stand) -> Callable[[int], None]:
    """Return a function that changes one more element in 200 by an eighth before each request."""
    weight = np.frombuffer(faults.stored(stand.repository / "slowly" / "1", "b"), np.uint16)
    places = faults.copies(stand.server.process.pid, weight.tobytes())
    order = np.random.default_rng(0).permutation(len(weight))

    def inject(number: int) -> None:
        worse = weight.copy()
        worse[order[: number * len(weight) // 1000]] ^= np.uint16(1 << 4)
        for place in places:
            place.write(worse.tobytes())

    return inject


class Fault(NamedTuple):
    """A fault of ``model``, described by ``words``; it must give one of ``causes``, and fire ``alert``."""

    model: str
    words: str
    causes: set[str]
    alert: str
    inject: Callable[[Stand], Callable[[int], None]] = lambda stand: no_fault
    scale: float = 1.0
    healthy: bool = True  # before the fault; False if the fault is in the artifact and so is there from the beginning
    most: int = 50  # samples until it is detected
    action: str = "fp32 answers"  # what the server does; it falls back if the drift is over its budget


SHORT = ("flipped", "scaled", "not_a_number")  # in `make test`; the others take longer, and detection works the same
FAULTS = (
    Fault("flipped", "bits flipped in loaded weights", {"broken"}, "Bf16ModelBroken", flipped),
    Fault("swapped", "two loaded weights of one shape swapped", {"broken"}, "Bf16ModelBroken", swapped),
    Fault(
        "slowly",
        "weights that decay, element by element",
        {"rounding", "broken"},
        "Bf16DriftChanged",
        slowly,
        most=MOST,
    ),
    Fault(
        "scaled",
        "inputs times 2²⁰",
        {"out_of_range"},
        "Bf16InputOutOfRange",
        scale=2.0**20,
        action="bf16 answers: the model is sound",
    ),
    Fault(
        "accumulated_in_bf16",
        "sums accumulated in bf16",
        {"rounding"},
        "Bf16DriftChanged",
        healthy=False,
        action="bf16 answers: it is within its budget",
    ),
    Fault("cancelling", "bf16 where large values cancel", {"broken"}, "Bf16ModelBroken", healthy=False),
    # One row in six has a NaN: a run of fifty rows without one sometimes occurs.
    Fault("not_a_number", "NaN in one of two outputs", {"broken"}, "Bf16ModelBroken", healthy=False, most=100),
)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, id=each.model, marks=[] if each.model in SHORT else pytest.mark.long) for each in FAULTS],
)
def test_a_fault_is_detected_raises_its_alert_and_fp32_serves(stand: Stand, fault: Fault) -> None:
    inject = fault.inject(stand)
    if fault.healthy:
        stand.measure(fault.model, HEALTHY)
        stand.is_well(fault.model)
        assert stand.metric("fallback_active", fault.model) == 0
    since = time.time()
    seen = until_seen(stand, fault.model, inject, fault.scale)
    assert seen.samples <= fault.most
    until(lambda: fault.alert in stand.alerts(fault.model), PATIENCE_S, fault.alert)
    assert seen.causes <= fault.causes
    if fault.action == "fp32 answers":
        falls_back(stand, fault.model, fault.scale, inject)
    else:
        assert stand.metric("fallback_active", fault.model) == 0
    named = seen.over or "out_of_range" in seen.causes
    how = f"`cause` {' or '.join(sorted(seen.causes))}" if named else "the change detector"
    record(Row(fault.words, how, str(seen.samples), stand.fired(fault.model, since), fault.action))


@pytest.mark.long
def test_a_healthy_model_raises_no_alert(stand: Stand) -> None:
    """Run after the other tests: their faulty models must not affect this one."""
    stand.measure("sound", HEALTHY)
    stand.is_well("sound")
    assert stand.ask("sound", rows(1, next(_seeds)))[0] == "bf16"
    assert stand.metric("drift_over_budget", "sound") == 0
    record(Row("none", "", f"none in {HEALTHY}", "none", "bf16 answers"))


@pytest.mark.long
def test_a_reference_that_cannot_be_loaded_raises_an_alert(stand: Stand) -> None:
    since = time.time()
    artifact = stand.repository / "unreadable" / "1"
    (artifact / "reference.onnx").rename(artifact / "another.onnx")
    stand.ask("unreadable", rows(1, next(_seeds)))
    until(lambda: "Bf16ReferenceDown" in stand.alerts("unreadable"), PATIENCE_S, "the alert")
    assert stand.ask("unreadable", rows(1, next(_seeds)))[0] == "bf16"
    alerts = stand.fired("unreadable", since)
    record(Row("a reference that cannot be loaded", "`reference_up` 0", "", alerts, "bf16 answers, unmeasured"))


@contextmanager
def slowed(process: int, times: int) -> Iterator[None]:
    """Stop the process most of the time, so that it runs ``times`` times slower."""

    def stop_for_a_moment() -> None:
        os.kill(process, signal.SIGSTOP)
        time.sleep(0.002 * (times - 1))  # the fault: the process stands still for so long
        os.kill(process, signal.SIGCONT)

    with repeating(stop_for_a_moment, pause=0.002):
        yield


@contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """Stop the process that measures, and each that is started in its place."""

    def signal_all(number: signal.Signals) -> None:
        for process in pids(server, SHADOW):
            os.kill(process, number)

    try:
        with repeating(lambda: signal_all(signal.SIGSTOP), pause=0.01):
            yield
    finally:
        signal_all(signal.SIGCONT)


@pytest.mark.long
def test_an_alert_reports_that_no_sample_is_measured(stand: Stand) -> None:
    """Samples wait for a process that does nothing until there is no room, and the server answers all requests."""
    x, since = rows(1, next(_seeds)), time.time()

    def told() -> bool:
        for _ in range(500):
            stand.ask("starved", x)
        return bool(stand.alerts("starved"))

    with stopped(stand.server):
        until(told, max(90, PATIENCE_S), "the alert")
        assert stand.alerts("starved") == {"Bf16ShadowStarved"}
    assert stand.measured("starved") == 0
    assert stand.metric("drift_samples_total", "starved", outcome="dropped") > 0
    alerts = stand.fired("starved", since)
    record(Row("samples that have no room", "none is measured", "", alerts, "bf16 answers, unmeasured"))


@pytest.mark.long
def test_a_slow_or_killed_reference_loses_samples_but_no_responses(stand: Stand) -> None:
    """Run last: one process measures all models."""
    before = stand.metric("drift_samples_total", "sound", outcome="dropped")
    (process,) = pids(stand.server, SHADOW)
    with slowed(process, 100):

        def dropped() -> bool:
            for _ in range(50):
                begun = time.monotonic()
                assert stand.ask("sound", rows(1, next(_seeds)))[0] == "bf16"
                assert time.monotonic() - begun < 5
            return stand.metric("drift_samples_total", "sound", outcome="dropped") > before

        until(dropped, 60, "samples that are dropped")
    record(Row("a reference slowed 100 times", "samples `dropped`", "", "none", "bf16 answers, measured less often"))

    os.kill(process, signal.SIGKILL)
    until(lambda: pids(stand.server, SHADOW) not in ([], [process]), 10, "another in its place")
    stand.measure("sound", QUEUE_SIZE)
    # Alerts fire at once in this test. In production their `for:` outlasts a few failed samples and a short restart.
    assert stand.alerts("sound") <= {"Bf16ReferenceDown", "Bf16ShadowFailing"}
    assert stand.ask("sound", rows(1, next(_seeds)))[0] == "bf16"
    record(
        Row(
            "a reference that is killed",
            "`reference_up` 0",
            "",
            "none that lasts",
            "bf16 answers; the reference is started again",
        )
    )


def test_the_page_has_every_fault() -> None:
    """docs/drift.md, as ``make bench-drift`` writes it, lists each fault of this file."""
    page = (Path(__file__).parents[2] / "docs" / "drift.md").read_text("utf-8")
    others = re.findall(r'Row\(\s*"([^"]+)"', Path(__file__).read_text("utf-8"))
    assert {fault.words for fault in FAULTS} | {*others} <= set(listed(page))
    assert len(others) >= 5
