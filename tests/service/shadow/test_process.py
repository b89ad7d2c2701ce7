"""The process with the references as its leader sees it, here while the process does not run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from openfiles import no_more_files
from waiting import until

from service.config.serverconfig import ServerConfig
from service.models.plan import Plan
from service.models.policy import Serving
from service.peers.channel import Body
from service.peers.child import SILENT_SECONDS
from service.peers.peer import Message
from service.shadow.activity import ActivityTracker
from service.shadow.process import _MAX_SAMPLES, NAME, ShadowProcess
from service.telemetry.counts import Counting
from service.telemetry.metrics import Metrics

UP = "bf16kit_drift_reference_up"


def plan_of(stamp: str, version: int = 1) -> Plan:
    return Plan(version, Path("/models/m"), Serving(), stamp)


Give = Callable[..., "Future[Body]"]


@pytest.fixture
def served() -> list[tuple[str, int]]:
    return [("m", 1), ("other", 1)]


@pytest.fixture
def counting(served: list[tuple[str, int]]) -> Counting:
    return Counting(Metrics(), dict, lambda: served)


@pytest.fixture
def shadow(tmp_path: Path, counting: Counting) -> Iterator[ShadowProcess]:
    process = ShadowProcess(
        ServerConfig(repository=tmp_path),
        lambda message: counting.receive(NAME, message.body),
        lambda: counting.process_died(NAME),
        on_forget=counting.forget,
    )
    yield process
    process.close()


@pytest.fixture
def file() -> Iterator[int]:
    made = os.memfd_create("samples")
    yield made
    os.close(made)


@pytest.fixture
def give(shadow: ShadowProcess, file: int) -> Give:
    """Return a function that hands one sample over."""

    def given(model: str = "m", stamp: str = "w") -> Future[Body]:
        plan = plan_of(stamp)
        body = {"model": model, "version": 1, "plan": plan.digest, "nbytes": 10, "samples": [{}]}
        return shadow.ask(plan, "samples", body, [file])

    return given


def told(metrics: Metrics) -> Message:
    families, complete = metrics.report("bf16kit_drift_")
    return Message({"metrics": [family.as_json() for family in families], "complete": complete})


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_samples_that_wait_for_the_process_are_dropped_when_their_model_is_unloaded(
    shadow: ShadowProcess, give: Give
) -> None:
    """Otherwise a model would be measured that is no longer served."""
    opened = open_files()
    given = [give(), give("other"), give(stamp="newer")]
    assert open_files() == opened + 3
    shadow.forget("m", plan_of("w").digest)
    assert given[0].result(0) == {"outcomes": ["dropped"]}
    assert not given[1].done()
    assert not given[2].done(), "of what was loaded in its place"
    shadow.forget("m")
    assert given[2].result(0) == {"outcomes": ["dropped"]}
    assert (open_files(), shadow._bytes_in_flight, shadow._in_flight.total()) == (opened + 1, 10, 1)
    assert [each.body["model"] for each in shadow._early] == ["other"]


def test_a_model_unloaded_while_the_process_is_dead_is_not_shown_as_down(
    shadow: ShadowProcess, give: Give, counting: Counting, served: list[tuple[str, int]]
) -> None:
    give()
    give("other")
    theirs = Metrics()
    for model, version in served:
        theirs.add(model, version).reference_up(True)
    shadow._receive_counts(told(theirs))
    shadow._handle_death()

    def up() -> dict[str, float]:
        return {series.labels["model"]: series.value for series in counting.samples([UP])}

    assert up() == {"m": 0, "other": 0}
    served.remove(("m", 1))
    shadow.forget("m", plan_of("w").digest)
    assert up() == {"other": 0}
    shadow._handle_death()  # again, before the process has reported anything
    assert up() == {"other": 0}


def test_samples_without_a_file_take_no_room(shadow: ShadowProcess, give: Give) -> None:
    with no_more_files():
        for _ in range(_MAX_SAMPLES + 1):
            with pytest.raises(OSError, match="Too many open files"):
                give()
    assert (shadow._bytes_in_flight, shadow._in_flight.total()) == (0, 0)
    assert not give().done()


def test_the_process_may_be_silent_for_longer_than_a_worker(shadow: ShadowProcess) -> None:
    """The process runs only when no other process needs a processor."""
    assert shadow._child._silent_seconds >= 10 * SILENT_SECONDS


def test_a_missing_reference_is_reported_as_down_from_the_first_sample_on(
    give: Give, counting: Counting, shadow: ShadowProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if the process never starts: an alert needs a value."""

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    assert list(counting.samples([UP])) == []
    give()
    assert [(each.labels, each.value) for each in counting.samples([UP])] == [({"model": "m", "version": "1"}, 0.0)]
    monkeypatch.setattr("subprocess.Popen", refuse)
    shadow.maintain()
    assert shadow.peer is None
    assert [each.value for each in counting.samples([UP])] == [0.0]


def test_a_wanted_reference_that_the_process_does_not_report_is_down(
    shadow: ShadowProcess, give: Give, counting: Counting
) -> None:
    give()
    give("other")
    theirs = Metrics()
    theirs.add("m", 1).reference_up(True)
    shadow._receive_counts(told(theirs))
    assert {each.labels["model"]: each.value for each in counting.samples([UP])} == {"m": 1.0, "other": 0.0}


@pytest.fixture
def wanted() -> set[str]:
    """Return the versions that several workers are to serve."""
    return {"w", "v"}


@pytest.fixture
def several(tmp_path: Path, counting: Counting, wanted: set[str]) -> Iterator[ShadowProcess]:
    config = ServerConfig(repository=tmp_path)

    def find(model: str, version: int, digest: str) -> Plan | None:
        return next((plan for stamp in wanted if (plan := plan_of(stamp, version)).digest == digest), None)

    process = ShadowProcess(
        config,
        lambda message: counting.receive(NAME, message.body),
        lambda: counting.process_died(NAME),
        shared=True,
        find_plan=find,
    )
    yield process
    process.close()


def test_a_sample_that_arrives_after_an_unload_does_not_load_the_model_again(
    several: ShadowProcess, wanted: set[str], counting: Counting, served: list[tuple[str, int]], file: int
) -> None:
    """Such a sample may come from a worker that was killed: everything it had sent is still read."""

    def give(stamp: str, version: int) -> Future[Body]:
        body = {"model": "m", "version": version, "plan": plan_of(stamp, version).digest, "nbytes": 10, "samples": [{}]}
        return several.forward(Message(body, (file,)))

    served[:] = [("m", 1), ("m", 2)]
    first, second = give("w", 1), give("v", 2)
    wanted.remove("w")
    served.remove(("m", 1))
    several.forget("m")
    assert first.result(0) == {"outcomes": ["dropped"]}
    assert not second.done(), "of a version that goes on"
    assert give("w", 1).result(0) == {"outcomes": ["dropped"]}
    assert several._known() == [("m", 2)]
    assert [each.labels["version"] for each in counting.samples([UP])] == ["2"]


def test_a_reference_that_ends_the_process_twice_stays_off_until_a_reload(
    shadow: ShadowProcess, give: Give, counting: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    def dies(label: str) -> None:
        """Simulate the death of the process while it loads this reference."""
        tracker = ActivityTracker(file := shadow._crashes.process_started())
        os.close(file)
        with tracker.track(label, "loading"):
            shadow._handle_death()

    give()
    give("other")
    dies("model 'm' version 1")
    assert shadow.off_reason("m", 1) == ""
    dies("model 'm' version 1")
    reason = "the process that measures died 2 times in a row while the fp32 reference of this model was being loaded"
    assert shadow.off_reason("m", 1).startswith(reason)
    assert shadow.off_reason("other", 1) == ""
    assert f"model 'm' version 1: no live drift: {reason}" in caplog.text
    assert give().result(0) == {"outcomes": ["failed"]}
    assert not give("other").done(), "it waits for the next process"
    assert {each.labels["model"]: each.value for each in counting.samples([UP])} == {"m": 0.0, "other": 0.0}
    newer = give(stamp="newer")
    assert (newer.done(), shadow.off_reason("m", 1)) == (False, "")


def test_the_leaders_own_report_does_not_overwrite_a_later_one_of_the_process(tmp_path: Path, file: int) -> None:
    """Otherwise the process's counts would be mistaken for those after a restart, and counted twice."""
    heard: list[int] = []
    theirs = Metrics()
    theirs.add("m", 1).reference_up(True)
    report = told(theirs)
    telling = threading.Thread(target=lambda: process._receive_counts(report))

    def receive(message: Message) -> None:
        if telling.ident is None:
            telling.start()
            telling.join(0.1)  # the process's report begins just now, and waits
        heard.append(len(message.body["metrics"]))

    process = ShadowProcess(ServerConfig(repository=tmp_path), receive, lambda: None)
    plan = plan_of("w")
    body = {"version": 1, "plan": plan.digest, "nbytes": 1, "samples": [{}]}
    process.ask(plan, "samples", {**body, "model": "m"}, [file])
    telling.join()
    process.ask(plan, "samples", {**body, "model": "n"}, [file])
    process.close()
    assert heard == [1, len(report.body["metrics"])]


NOTING = """
import os, socket, sys
from service.peers.channel import Channel
end = Channel(socket.socket(fileno=int(sys.argv[1])))
with open(os.environ["NOTES"], "w", buffering=1) as notes:
    while (received := end.receive()) is not None:
        notes.write(received[0]["kind"] + "\\n")
"""


def test_samples_that_arrive_while_the_process_is_started_are_sent_after_its_start(
    shadow: ShadowProcess, give: Give, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start has the memory in which it notes what it opens: the first open must be noted, too."""
    (tmp_path / "noting_messages.py").write_text(NOTING)
    notes = tmp_path / "notes"
    monkeypatch.setattr(shadow._child, "_module", "noting_messages")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("NOTES", str(notes))
    begin = shadow._crashes.process_started

    def started() -> int:
        give()
        return begin()

    give("other")
    monkeypatch.setattr(shadow._crashes, "process_started", started)
    shadow.maintain()
    give()
    until(lambda: notes.exists() and notes.read_text().count("samples") == 3, 60, "all messages")
    kinds = [kind for kind in notes.read_text().split() if kind != "ping"]
    assert kinds == ["start", "measure", "measure", "samples", "samples", "samples"]
