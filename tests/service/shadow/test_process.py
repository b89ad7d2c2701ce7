"""The process with the references as its leader sees it, here while the process does not run."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from openfiles import no_more_files
from waiting import until

from bf16kit.messages.errors import NotFound, Unavailable
from service.config.serverconfig import ServerConfig
from service.models.plan import Plan
from service.models.serving import Serving
from service.peers.channel import Body
from service.peers.child import SILENT_SECONDS
from service.peers.peer import Message, Peer
from service.shadow import process as process_module
from service.shadow.process import _MAX_SAMPLES, NAME, ShadowProcess
from service.telemetry.counts import Counting
from service.telemetry.metrics import Metrics, Sample
from service.telemetry.values import to_message

UP = "bf16kit_drift_reference_up"


def plan_of(stamp: str, version: int = 1) -> Plan:
    return Plan(version, Path("/models/m"), Serving(labels={"y": ("a cat", "a dog")}), stamp)


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


def told(metrics: Metrics) -> Future[Body]:
    answer: Future[Body] = Future()
    answer.set_result({"metrics": to_message(metrics.values("drift_"))})
    return answer


def up(counting: Counting) -> list[Sample]:
    return [each for each in counting.samples() if each.name == UP]


def receive(shadow: ShadowProcess, theirs: Metrics) -> None:
    """Have the leader receive the counts of the process."""
    shadow._receive_counts(told(theirs))


def open_files() -> set[tuple[str, int]]:
    """Return this process' descriptors and their inodes: what earlier tests have left open may be closed meanwhile."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this listing
            found.add((descriptor.name, descriptor.stat().st_ino))
    return found


def test_samples_that_wait_for_the_process_are_dropped_when_their_model_is_unloaded(
    shadow: ShadowProcess, give: Give
) -> None:
    """Otherwise a model would be measured that is no longer served."""
    opened = open_files()
    given = [give(), give("other"), give(stamp="newer")]
    assert len(open_files() - opened) == 3
    shadow.forget("m", plan_of("w").digest)
    assert given[0].result(0) == {"outcomes": ["dropped"]}
    assert not given[1].done()
    assert not given[2].done(), "of what was loaded in its place"
    shadow.forget("m")
    assert given[2].result(0) == {"outcomes": ["dropped"]}
    assert (len(open_files() - opened), shadow._bytes_in_flight, shadow._in_flight.total()) == (1, 10, 1)
    assert [each.body["model"] for each in shadow._early] == ["other"]


def test_a_model_unloaded_while_the_process_is_dead_is_not_shown_as_down(
    shadow: ShadowProcess, give: Give, counting: Counting, served: list[tuple[str, int]]
) -> None:
    give()
    give("other")
    theirs = Metrics()
    for model, version in served:
        theirs.add(model, version).reference_up(True)
    receive(shadow, theirs)
    shadow._handle_death()

    def by_model() -> dict[str, float]:
        return {each.labels["model"]: each.value for each in up(counting)}

    assert by_model() == {"m": 0, "other": 0}
    served.remove(("m", 1))
    shadow.forget("m", plan_of("w").digest)
    assert by_model() == {"other": 0}
    shadow._handle_death()  # again, before the process has reported anything
    assert by_model() == {"other": 0}


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

    assert up(counting) == []
    give()
    assert [(each.labels, each.value) for each in up(counting)] == [({"model": "m", "version": "1"}, 0.0)]
    monkeypatch.setattr("subprocess.Popen", refuse)
    shadow.maintain()
    assert shadow.peer is None
    assert [each.value for each in up(counting)] == [0.0]


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
    assert list(several._plans) == [("m", 2)]
    assert [each.labels["version"] for each in up(counting)] == ["2"]


class Clock:
    """A clock that the test sets, in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(shadow: ShadowProcess, monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(shadow, "_clock", found)
    return found


def die(shadow: ShadowProcess, *doing: tuple[str, str]) -> None:
    """Simulate the death of the process while it does this."""
    for model, what in doing:
        shadow._note_unanswered((model, 1), what, Unavailable("it has ended"))
    shadow._handle_death()


def test_after_three_deaths_in_ten_minutes_it_stays_off_and_the_log_names_what_was_at_work(
    shadow: ShadowProcess, give: Give, counting: Counting, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    early = give()
    for after in (0.0, 301.0, 300.0):  # the first and the third are more than ten minutes apart
        clock.now += after
        die(shadow, ("m", "being loaded"))
    assert shadow.off_reason("m", 1) == ""
    assert not early.done()
    clock.now += 299.0
    die(shadow, ("m", "being loaded"), ("other", "running"))
    reason = shadow.off_reason("m", 1)
    assert "died 3 times within 10 minutes and stays off" in reason
    assert "at work each time: model 'm' version 1 (being loaded). Set shadow.rate: 0" in reason
    assert "restart the server to try again" in reason
    assert reason in caplog.text
    with pytest.raises(Unavailable):
        early.result(0)
    assert give().result(0) == give("other").result(0) == {"outcomes": ["failed"]}
    assert {each.labels["model"]: each.value for each in up(counting)} == {"m": 0.0, "other": 0.0}
    assert (shadow._bytes_in_flight, shadow._in_flight.total()) == (0, 0)
    shadow.maintain()
    assert shadow._child.pid is None


def test_if_nothing_was_at_work_at_each_death_the_last_is_named(shadow: ShadowProcess, give: Give) -> None:
    give()
    for model in ("m", "other", "other"):
        die(shadow, (model, "running"))
    assert "at work the last time: model 'other' version 1 (running)" in shadow.off_reason("m", 1)
    assert shadow.off_reason("other", 1) == "", "of which no sample came"


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
    assert heard == [1, len(report.result()["metrics"])]


NOTING = """
import json, os, socket, sys
from service.peers.channel import Channel
end = Channel(socket.socket(fileno=int(sys.argv[1])))
with open(os.environ["NOTES"], "w", buffering=1) as notes:
    while (received := end.receive()) is not None:
        notes.write(json.dumps(received[0]) + "\\n")
"""


def test_samples_that_arrive_while_the_process_is_started_are_sent_after_its_start(
    shadow: ShadowProcess, give: Give, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noting_messages.py").write_text(NOTING)
    notes = tmp_path / "notes"
    monkeypatch.setattr(shadow._child, "_module", "noting_messages")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("NOTES", str(notes))
    begin = shadow._child._on_start

    def started(peer: Peer) -> None:
        give()
        begin(peer)

    give("other")
    monkeypatch.setattr(shadow._child, "_on_start", started)
    shadow.maintain()
    give()
    until(lambda: notes.exists() and notes.read_text().count('"kind": "samples"') == 3, 60, "all messages")
    kinds = [kind for line in notes.read_text().splitlines() if (kind := json.loads(line)["kind"]) != "ping"]
    assert kinds == ["start", "measure", "measure", "counts", "samples", "samples", "samples"]
    assert "a cat" not in notes.read_text(), "labels are many, and only needed to answer requests"


EVIDENCE = """
import os, socket, sys
from bf16kit.messages.errors import NotFound
from service.peers.channel import Channel
from service.peers.peer import Peer
def evidence(message):
    if message.body["model"] == "m":
        os.pwrite(message.files[0], bytes(range(256)) * (1 << 16), 0)
        return {"bytes": 1 << 24}
    if message.body["model"] == "silent":
        from concurrent.futures import Future
        return Future()
    raise NotFound("no breach yet")
import threading
over = threading.Event()
peer = Peer(Channel(socket.socket(fileno=int(sys.argv[1]))), "the server", {"evidence": evidence}, over.set)
peer.start()
over.wait()
"""


def test_large_evidence_arrives_complete_and_each_cause_of_missing_evidence_has_its_error(
    shadow: ShadowProcess, give: Give, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "having_evidence.py").write_text(EVIDENCE)
    monkeypatch.setattr(shadow._child, "_module", "having_evidence")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(NotFound, match="model 'm' version 1: no live sample has been measured"):
        shadow.evidence("m", 1)
    give()
    shadow.maintain()
    opened = open_files()
    assert shadow.evidence("m", 1) == bytes(range(256)) * (1 << 16)
    with pytest.raises(NotFound, match="no breach yet"):
        shadow.evidence("n", 1)
    monkeypatch.setattr(process_module, "EVIDENCE_SECONDS", 0.01)
    with pytest.raises(Unavailable, match="did not answer within"):
        shadow.evidence("silent", 1)
    until(lambda: open_files() <= opened)
