"""The process with the references as its leader sees it: small programs, which die when the test wants it."""

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from openfiles import no_more_files
from waiting import until

from bf16kit.messages.errors import NotFound, Unavailable
from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.drift.sampler import QUEUE_SIZE
from bf16kit.service.models.plan import Plan
from bf16kit.service.models.serving import Serving
from bf16kit.service.peers.channel import Body
from bf16kit.service.peers.child import SILENT_SECONDS
from bf16kit.service.peers.peer import Message
from bf16kit.service.shadow import process as process_module
from bf16kit.service.shadow.process import NAME, ShadowProcess
from bf16kit.service.telemetry.metrics import Counting, Metrics
from bf16kit.service.telemetry.values import to_message


def plan_of(stamp: str, version: int = 1) -> Plan:
    return Plan(version, Path("/models/m"), Serving(labels={"y": ("a cat", "a dog")}), stamp)


# Reports the counts in the file COUNTS when that is there, has evidence of the model m only, and does not answer the
# rest: it is at work until it dies.
AT_WORK = """
import json, os, socket, sys, threading, time
from concurrent.futures import Future
from bf16kit.messages.errors import NotFound
from bf16kit.service.peers.channel import Channel
from bf16kit.service.peers.peer import Peer

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

def evidence(message):
    if message.body["model"] == "m":
        os.pwrite(message.files[0], bytes(range(256)) * (1 << 16), 0)
        return {"bytes": 1 << 24}
    if message.body["model"] == "silent":
        return Future()
    raise NotFound("no breach yet")

over = threading.Event()
never = {kind: lambda message: Future() for kind in ("samples", "measure")}
quiet = {kind: lambda message: None for kind in ("start", "ping", "forget")}
end = socket.socket(fileno=int(sys.argv[1]))
peer = Peer(Channel(end), "the server", {**never, **quiet, "counts": counts, "evidence": evidence}, over.set)
peer.start()
over.wait()
"""


class Rig:
    """The leader of a process that runs ``program``, and what it needs of the server. It has one process or several."""

    def __init__(self, directory: Path, program: str = AT_WORK, *, several: bool = False) -> None:
        self.now = 0.0
        self.served = [("m", 1), ("other", 1)]
        self.counting = Counting(Metrics(), dict, lambda: self.served)
        self.counts = directory / "counts.json"  # what the process reports, once it is written
        self.heard: list[int] = []  # series in each report to the leader
        self.on_counts: Callable[[], None] = lambda: None
        self.wanted = {"w", "v"}  # the plans by which several processes are to serve
        self.file = os.memfd_create("samples")
        (directory / "program_of_the_test.py").write_text(program)
        self.shadow = ShadowProcess(
            ServerConfig(repository=directory),
            self._receive,
            lambda: self.counting.process_died(NAME),
            on_forget=self.counting.forget,
            find_plan=self._find if several else None,
            clock=lambda: self.now,
            module="program_of_the_test",
        )

    def _receive(self, message: Message) -> None:
        self.on_counts()
        self.heard.append(len(message.body["metrics"]))
        self.counting.receive(NAME, message.body)

    def _find(self, model: str, version: int, digest: str) -> Plan | None:
        return next((plan for stamp in self.wanted if (plan := plan_of(stamp, version)).digest == digest), None)

    def close(self) -> None:
        self.shadow.close()
        os.close(self.file)

    def give(self, model: str = "m", stamp: str = "w", version: int = 1) -> Future[Body]:
        """Hand over one sample."""
        plan = plan_of(stamp, version)
        body = {"model": model, "version": version, "plan": plan.digest, "nbytes": 10, "samples": [{}]}
        return self.shadow.ask(plan, "samples", body, [self.file])

    def forward(self, stamp: str, version: int) -> Future[Body]:
        """Hand over one sample of another process."""
        digest = plan_of(stamp, version).digest
        body = {"model": "m", "version": version, "plan": digest, "nbytes": 10, "samples": [{}]}
        return self.shadow.forward(Message(body, (self.file,)))

    def fill(self) -> list[Future[Body]]:
        """Give a model's samples until one too many is dropped, and return the others."""
        given = [self.give() for _ in range(2 * QUEUE_SIZE + 1)]
        assert given[-1].result(0) == {"outcomes": ["dropped"]}
        return given[:-1]

    def up(self, metric: str = "reference_up") -> dict[tuple[str, int], float]:
        """Return which versions' references are shown as up, or another metric of each version."""
        found = [each for each in self.counting.samples() if each.name == f"bf16kit_drift_{metric}"]
        return {(each.labels["model"], int(each.labels["version"])): each.value for each in found}

    def report(self, *versions: tuple[str, int]) -> None:
        """Have the process report that it has these versions' references, and measured a sample of each at 5 s."""
        metrics = Metrics()
        for model, version in versions:
            added = metrics.add(model, version)
            added.reference_up(True)
            added.last_sample(5.0)
        new = self.counts.with_suffix(".new")
        new.write_text(json.dumps({"metrics": to_message(metrics.values("drift_"))}))
        new.rename(self.counts)

    def start(self) -> int:
        """Start the process, and return its pid."""
        self.shadow.maintain()
        assert self.shadow.pid is not None
        return self.shadow.pid

    def kill(self, after: float = 60.0) -> None:
        """Have the process die ``after`` so many seconds, and its leader notice; then wait for any pause to end."""
        pid = self.start()
        self.now += after
        os.kill(pid, signal.SIGKILL)

        def noticed() -> bool:
            self.shadow.maintain()
            return self.shadow.pid != pid

        until(noticed, 30, "its death")
        self.now += 60.0


Make = Callable[..., Rig]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    path = [str(tmp_path), os.environ.get("PYTHONPATH", ""), str(Path.cwd())]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("COUNTS", str(tmp_path / "counts.json"))
    made: list[Rig] = []

    def build(program: str = AT_WORK, *, several: bool = False) -> Rig:
        made.append(Rig(tmp_path, program, several=several))
        return made[-1]

    yield build
    for rig in made:
        rig.close()


@pytest.fixture
def rig(make: Make) -> Rig:
    return make()


def open_files() -> set[tuple[str, int]]:
    """Return this process' descriptors and their inodes: what earlier tests have left open may be closed meanwhile."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this listing
            found.add((descriptor.name, descriptor.stat().st_ino))
    return found


def test_samples_that_wait_for_the_process_are_dropped_when_their_model_is_unloaded(rig: Rig) -> None:
    """Otherwise a model would be measured that is no longer served."""
    opened = open_files()
    given = [rig.give(), rig.give("other"), rig.give(stamp="newer")]
    assert len(open_files() - opened) == 3
    rig.shadow.forget("m", plan_of("w").digest)
    assert given[0].result(0) == {"outcomes": ["dropped"]}
    assert not given[1].done()
    assert not given[2].done(), "of what was loaded in its place"
    rig.shadow.forget("m")
    assert given[2].result(0) == {"outcomes": ["dropped"]}
    assert len(open_files() - opened) == 1
    assert not any(each.done() for each in rig.fill()), "the dropped ones have left their room"


def test_a_model_unloaded_while_the_process_is_dead_is_not_shown_as_down(rig: Rig) -> None:
    rig.give()
    rig.give("other")
    rig.report(*rig.served)
    rig.start()
    until(lambda: rig.up() == {("m", 1): 1, ("other", 1): 1}, 30, "its report")
    rig.counts.unlink()
    rig.kill()
    assert rig.up() == {("m", 1): 0, ("other", 1): 0}
    assert rig.up("last_sample_timestamp_seconds") == {("m", 1): 5, ("other", 1): 5}, "which its death does not change"
    rig.served.remove(("m", 1))
    rig.shadow.forget("m", plan_of("w").digest)
    assert rig.up() == {("other", 1): 0}
    rig.kill()  # before it has reported anything
    assert rig.up() == {("other", 1): 0}


def test_samples_without_a_file_take_no_room(rig: Rig) -> None:
    with no_more_files():
        for _ in range(2 * QUEUE_SIZE + 1):
            with pytest.raises(OSError, match="Too many open files"):
                rig.give()
    assert not any(each.done() for each in rig.fill())


def test_the_process_may_be_silent_for_longer_than_a_worker(rig: Rig) -> None:
    """The process runs only when no other process needs a processor."""
    rig.give()
    rig.report(("m", 1))
    pid = rig.start()
    until(lambda: rig.up() == {("m", 1): 1}, 30, "its report")
    rig.now += 1.0
    rig.shadow.maintain()
    assert rig.shadow.peer is not None
    assert rig.shadow.peer.ask("ping").result(30) == {}, "and the one before it: it has begun to answer"
    os.kill(pid, signal.SIGSTOP)
    for _ in range(round(10 * SILENT_SECONDS)):
        rig.now += 1.0
        rig.shadow.maintain()
    assert rig.shadow.pid == pid
    os.kill(pid, signal.SIGCONT)
    assert rig.shadow.peer.ask("ping").result(30) == {}


def test_a_missing_reference_is_reported_as_down_from_the_first_sample_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if the process never starts: an alert needs a value."""

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    assert rig.up() == {}
    rig.give()
    assert rig.up() == {("m", 1): 0}
    monkeypatch.setattr("subprocess.Popen", refuse)
    rig.shadow.maintain()
    assert rig.shadow.peer is None
    assert rig.up() == {("m", 1): 0}


def test_a_sample_that_arrives_after_an_unload_does_not_load_the_model_again(make: Make) -> None:
    """Such a sample may come from a worker that was killed: everything it had sent is still read."""
    rig = make(several=True)
    rig.served[:] = [("m", 1), ("m", 2)]
    first, second = rig.forward("w", 1), rig.forward("v", 2)
    rig.wanted.remove("w")
    rig.served.remove(("m", 1))
    rig.shadow.forget("m")
    assert first.result(0) == {"outcomes": ["dropped"]}
    assert not second.done(), "of a version that goes on"
    assert rig.forward("w", 1).result(0) == {"outcomes": ["dropped"]}
    assert rig.up() == {("m", 2): 0}


def test_after_three_deaths_in_ten_minutes_it_stays_off_and_the_log_names_what_was_at_work(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.give()
    for after in (
        0.0,
        241.0,
        240.0,
    ):  # the first and the third are more than ten minutes apart, with the minutes between
        rig.kill(after)
    assert rig.shadow.off_reason("m", 1) == ""
    early = rig.give("other")
    rig.kill(239.0)
    reason = rig.shadow.off_reason("m", 1)
    assert "died 3 times within 10 minutes and stays off" in reason
    assert "at work each time: model 'm' version 1 (being loaded). Set shadow.rate: 0" in reason
    assert "restart the server to try again" in reason
    assert reason in caplog.text
    with pytest.raises(Unavailable):
        early.result(0)
    assert rig.give().result(0) == rig.give("other").result(0) == {"outcomes": ["failed"]}
    assert rig.up() == {("m", 1): 0, ("other", 1): 0}
    rig.shadow.maintain()
    assert rig.shadow.pid is None


def test_if_nothing_was_at_work_at_each_death_the_last_is_named(rig: Rig) -> None:
    for model in ("m", "other", "other"):
        rig.served[:] = [(model, 1)]
        rig.shadow.forget("m")
        rig.shadow.forget("other")
        rig.give(model)
        rig.kill()
    assert "at work the last time: model 'other' version 1 (" in rig.shadow.off_reason("other", 1)
    assert "'m'" not in rig.shadow.off_reason("other", 1)
    assert rig.shadow.off_reason("m", 1) == "", "which was unloaded"


def test_the_leaders_own_report_does_not_overwrite_a_later_one_of_the_process(rig: Rig) -> None:
    """Otherwise the process's counts would be mistaken for those after a restart, and counted twice."""

    def let_it_report() -> None:
        if rig.shadow.pid is not None and not rig.counts.exists():
            rig.report(("m", 1), ("n", 1), ("o", 1))
            until(rig.counts.with_suffix(".json.sent").exists, 60, "its report")
            threading.Event().wait(0.2)  # it arrives now, and waits

    rig.on_counts = let_it_report
    rig.give("m")
    rig.start()
    rig.give("n")
    until(lambda: len(rig.heard) == 3)
    rig.give("o")
    assert (rig.heard[:2], len(rig.heard)) == ([1, 2], 3), "its own report would drop the process's counters"
    assert rig.heard[2] > 2


NOTING = """
import json, os, socket, sys
from bf16kit.service.peers.channel import Channel
end = Channel(socket.socket(fileno=int(sys.argv[1])))
with open(os.environ["NOTES"], "w", buffering=1) as notes:
    while (received := end.receive()) is not None:
        notes.write(json.dumps(received[0]) + "\\n")
"""


def test_samples_that_arrive_while_the_process_is_started_are_sent_after_its_start(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notes, rig = tmp_path / "notes", make(NOTING)
    monkeypatch.setenv("NOTES", str(notes))

    class Started(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "is started" in record.getMessage():
                rig.give()

    rig.give("other")
    log, handler = logging.getLogger("bf16kit.service.peers.child"), Started()
    caplog.set_level(logging.INFO, log.name)
    log.addHandler(handler)
    try:
        rig.start()
    finally:
        log.removeHandler(handler)
    rig.give()
    until(lambda: notes.exists() and notes.read_text().count('"kind": "samples"') == 3, 60, "all messages")
    kinds = [kind for line in notes.read_text().splitlines() if (kind := json.loads(line)["kind"]) != "ping"]
    assert kinds == ["start", "measure", "measure", "counts", "samples", "samples", "samples"]
    assert "a cat" not in notes.read_text(), "labels are many, and only needed to answer requests"


def test_large_evidence_arrives_complete_and_each_cause_of_missing_evidence_has_its_error(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFound, match="model 'm' version 1: no live sample has been measured"):
        rig.shadow.evidence("m", 1)
    rig.give()
    rig.start()
    opened = open_files()
    assert rig.shadow.evidence("m", 1) == bytes(range(256)) * (1 << 16)
    with pytest.raises(NotFound, match="no breach yet"):
        rig.shadow.evidence("n", 1)
    monkeypatch.setattr(process_module, "EVIDENCE_SECONDS", 0.01)
    with pytest.raises(Unavailable, match="did not answer within"):
        rig.shadow.evidence("silent", 1)
    until(lambda: open_files() <= opened)
