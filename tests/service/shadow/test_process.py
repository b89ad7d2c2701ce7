"""The process with the references as its leader sees it: small programs, which die when the test wants it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from openfiles import no_more_files
from waiting import until

from bf16kit.messages.errors import NotFound, Unavailable
from service.config.serverconfig import ServerConfig
from service.drift.shadow import QUEUE_SIZE
from service.models.plan import Plan
from service.models.serving import Serving
from service.peers.channel import Body
from service.peers.child import SILENT_SECONDS
from service.peers.peer import Message
from service.shadow import process as process_module
from service.shadow.process import NAME, ShadowProcess
from service.telemetry.metrics import Counting, Metrics, Sample
from service.telemetry.values import to_message

UP = "bf16kit_drift_reference_up"


def plan_of(stamp: str, version: int = 1) -> Plan:
    return Plan(version, Path("/models/m"), Serving(labels={"y": ("a cat", "a dog")}), stamp)


Give = Callable[..., "Future[Body]"]
# Reports the counts in the file COUNTS when that is there, and does not answer the rest: it is at work until it dies.
AT_WORK = """
import json, os, socket, sys, threading, time
from concurrent.futures import Future
from service.peers.channel import Channel
from service.peers.peer import Peer

def counts(message):
    answer = Future()
    def wait():
        while not os.path.exists(os.environ["COUNTS"]):
            time.sleep(0.005)
        with open(os.environ["COUNTS"]) as file:
            answer.set_result(json.load(file))
        open(os.environ["COUNTS"] + ".sent", "w").close()
    threading.Thread(target=wait, daemon=True).start()
    return answer

over = threading.Event()
never = {kind: lambda message: Future() for kind in ("samples", "measure")}
quiet = {kind: lambda message: None for kind in ("start", "ping", "forget")}
end = socket.socket(fileno=int(sys.argv[1]))
peer = Peer(Channel(end), "the server", {**never, **quiet, "counts": counts}, over.set)
peer.start()
over.wait()
"""


class Clock:
    """A clock that the test sets, in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def served() -> list[tuple[str, int]]:
    return [("m", 1), ("other", 1)]


@pytest.fixture
def counting(served: list[tuple[str, int]]) -> Counting:
    return Counting(Metrics(), dict, lambda: served)


@pytest.fixture
def program() -> str:
    """Return the program of the process, which tests may override."""
    return AT_WORK


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    """Return the file whose counts the process reports once it is written."""
    return tmp_path / "counts.json"


Make = Callable[..., ShadowProcess]


@pytest.fixture
def make(
    tmp_path: Path, program: str, counts: Path, clock: Clock, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Yield a function that returns the leader of a process that runs ``program``."""
    (tmp_path / "program_of_the_test.py").write_text(program)
    path = [str(tmp_path), os.environ.get("PYTHONPATH", ""), str(Path.cwd())]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("COUNTS", str(counts))
    made: list[ShadowProcess] = []

    def build(receive: Callable[[Message], None] | None = None, **more: Any) -> ShadowProcess:
        process = ShadowProcess(
            ServerConfig(repository=tmp_path),
            receive or (lambda message: counting.receive(NAME, message.body)),
            lambda: counting.process_died(NAME),
            clock=clock,
            module="program_of_the_test",
            **more,
        )
        made.append(process)
        return process

    yield build
    for process in made:
        process.close()


@pytest.fixture
def shadow(make: Make, counting: Counting) -> ShadowProcess:
    return make(on_forget=counting.forget)


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


def up(counting: Counting) -> list[Sample]:
    return [each for each in counting.samples() if each.name == UP]


def report(counts: Path, *versions: tuple[str, int]) -> None:
    """Have the process report that it has these versions' references."""
    metrics = Metrics()
    for model, version in versions:
        metrics.add(model, version).reference_up(True)
    new = counts.with_suffix(".new")
    new.write_text(json.dumps({"metrics": to_message(metrics.values("drift_"))}))
    new.rename(counts)


def start(shadow: ShadowProcess) -> int:
    """Start the process, and return its pid."""
    shadow.maintain()
    assert shadow.pid is not None
    return shadow.pid


def kill(shadow: ShadowProcess, clock: Clock) -> None:
    """Have the process die, and its leader notice."""
    pid = start(shadow)
    os.kill(pid, signal.SIGKILL)

    def noticed() -> bool:
        shadow.maintain()
        return shadow.pid != pid

    until(noticed, 30, "its death")
    clock.now += 60.0  # longer than any pause before a restart


def fill(give: Give) -> list[Future[Body]]:
    """Give a model's samples until one too many is dropped, and return the others."""
    given = [give() for _ in range(2 * QUEUE_SIZE + 1)]
    assert given[-1].result(0) == {"outcomes": ["dropped"]}
    return given[:-1]


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
    assert len(open_files() - opened) == 1
    assert not any(each.done() for each in fill(give)), "the dropped ones have left their room"


def test_a_model_unloaded_while_the_process_is_dead_is_not_shown_as_down(
    shadow: ShadowProcess,
    give: Give,
    counting: Counting,
    served: list[tuple[str, int]],
    counts: Path,
    clock: Clock,
) -> None:
    give()
    give("other")

    def by_model() -> dict[str, float]:
        return {each.labels["model"]: each.value for each in up(counting)}

    report(counts, *served)
    start(shadow)
    until(lambda: by_model() == {"m": 1, "other": 1}, 30, "its report")
    counts.unlink()
    kill(shadow, clock)
    assert by_model() == {"m": 0, "other": 0}
    served.remove(("m", 1))
    shadow.forget("m", plan_of("w").digest)
    assert by_model() == {"other": 0}
    start(shadow)
    kill(shadow, clock)  # before it has reported anything
    assert by_model() == {"other": 0}


def test_samples_without_a_file_take_no_room(give: Give) -> None:
    with no_more_files():
        for _ in range(2 * QUEUE_SIZE + 1):
            with pytest.raises(OSError, match="Too many open files"):
                give()
    assert not any(each.done() for each in fill(give))


def test_the_process_may_be_silent_for_longer_than_a_worker(
    shadow: ShadowProcess, give: Give, counting: Counting, counts: Path, clock: Clock
) -> None:
    """The process runs only when no other process needs a processor."""
    give()
    report(counts, ("m", 1))
    pid = start(shadow)
    until(lambda: [each.value for each in up(counting)] == [1.0], 30, "its report")
    clock.now += 1.0
    shadow.maintain()
    assert shadow.peer is not None
    assert shadow.peer.ask("ping").result(30) == {}, "and the one before it: it has begun to answer"
    os.kill(pid, signal.SIGSTOP)
    for _ in range(round(10 * SILENT_SECONDS)):
        clock.now += 1.0
        shadow.maintain()
    assert shadow.pid == pid
    os.kill(pid, signal.SIGCONT)
    assert shadow.peer.ask("ping").result(30) == {}


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
def several(make: Make, wanted: set[str]) -> ShadowProcess:
    def find(model: str, version: int, digest: str) -> Plan | None:
        return next((plan for stamp in wanted if (plan := plan_of(stamp, version)).digest == digest), None)

    return make(find_plan=find)


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
    assert [each.labels["version"] for each in up(counting)] == ["2"]


def test_after_three_deaths_in_ten_minutes_it_stays_off_and_the_log_names_what_was_at_work(
    shadow: ShadowProcess, give: Give, counting: Counting, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    give()
    for after in (0.0, 301.0, 300.0):  # the first and the third are more than ten minutes apart
        start(shadow)
        clock.now += after - 60.0
        kill(shadow, clock)
    assert shadow.off_reason("m", 1) == ""
    early = give("other")
    start(shadow)
    clock.now += 299.0 - 60.0
    kill(shadow, clock)
    reason = shadow.off_reason("m", 1)
    assert "died 3 times within 10 minutes and stays off" in reason
    assert "at work each time: model 'm' version 1 (being loaded). Set shadow.rate: 0" in reason
    assert "restart the server to try again" in reason
    assert reason in caplog.text
    with pytest.raises(Unavailable):
        early.result(0)
    assert give().result(0) == give("other").result(0) == {"outcomes": ["failed"]}
    assert {each.labels["model"]: each.value for each in up(counting)} == {"m": 0.0, "other": 0.0}
    shadow.maintain()
    assert shadow.pid is None


def test_if_nothing_was_at_work_at_each_death_the_last_is_named(
    shadow: ShadowProcess, give: Give, clock: Clock, served: list[tuple[str, int]]
) -> None:
    for model in ("m", "other", "other"):
        served[:] = [(model, 1)]
        shadow.forget("m")
        shadow.forget("other")
        give(model)
        start(shadow)
        kill(shadow, clock)
    assert "at work the last time: model 'other' version 1 (" in shadow.off_reason("other", 1)
    assert "'m'" not in shadow.off_reason("other", 1)
    assert shadow.off_reason("m", 1) == "", "which was unloaded"


def test_the_leaders_own_report_does_not_overwrite_a_later_one_of_the_process(
    make: Make, file: int, counts: Path
) -> None:
    """Otherwise the process's counts would be mistaken for those after a restart, and counted twice."""
    heard: list[int] = []

    def receive(message: Message) -> None:
        if process.pid is not None and not counts.exists():
            report(counts, ("m", 1), ("n", 1), ("o", 1))
            until(counts.with_suffix(".json.sent").exists, 60, "its report")
            threading.Event().wait(0.2)  # it arrives now, and waits
        heard.append(len(message.body["metrics"]))

    process = make(receive)
    plan = plan_of("w")
    body = {"version": 1, "plan": plan.digest, "nbytes": 1, "samples": [{}]}
    process.ask(plan, "samples", {**body, "model": "m"}, [file])
    start(process)
    process.ask(plan, "samples", {**body, "model": "n"}, [file])
    until(lambda: len(heard) == 3)
    process.ask(plan, "samples", {**body, "model": "o"}, [file])
    assert (heard[:2], len(heard)) == ([1, 2], 3), "its own report would drop the process's counters"
    assert heard[2] > 2


NOTING = """
import json, os, socket, sys
from service.peers.channel import Channel
end = Channel(socket.socket(fileno=int(sys.argv[1])))
with open(os.environ["NOTES"], "w", buffering=1) as notes:
    while (received := end.receive()) is not None:
        notes.write(json.dumps(received[0]) + "\\n")
"""


@pytest.mark.parametrize("program", [NOTING])
def test_samples_that_arrive_while_the_process_is_started_are_sent_after_its_start(
    shadow: ShadowProcess,
    give: Give,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv("NOTES", str(notes))

    class Started(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "is started" in record.getMessage():
                give()

    give("other")
    log, handler = logging.getLogger("service.peers.child"), Started()
    caplog.set_level(logging.INFO, log.name)
    log.addHandler(handler)
    try:
        shadow.maintain()
    finally:
        log.removeHandler(handler)
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


@pytest.mark.parametrize("program", [EVIDENCE])
def test_large_evidence_arrives_complete_and_each_cause_of_missing_evidence_has_its_error(
    shadow: ShadowProcess, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
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
