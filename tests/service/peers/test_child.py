"""A child process that is kept running, with small programs instead of workers."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from childprocesses import children_of
from openfiles import no_more_files, no_more_threads
from waiting import until

from bf16kit.service.peers.child import (
    PING_SECONDS,
    SILENT_SECONDS,
    START_SECONDS,
    Child,
    ThreadSeconds,
    active_seconds,
)
from bf16kit.service.peers.peer import Handler
from bf16kit.system.controlgroup import Memory

_HEAD = "import os, signal, socket, sys, time\nend = socket.socket(fileno=int(sys.argv[1]))\n"
_ANSWERS = """
from bf16kit.service.peers.channel import Channel
from bf16kit.service.peers.peer import Peer
peer = Peer(Channel(end), "parent", {"ping": lambda message: None}, lambda: os._exit(0))
peer.start()
peer.tell("hello", {"directory": sys.path[0]})
"""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


Keep = Callable[..., Child]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lost() -> list[float]:
    return []


@pytest.fixture
def keep(tmp_path: Path, clock: Clock, lost: list[float]) -> Iterator[Keep]:
    """Yield a function that returns a child which keeps a program running."""
    children: list[Child] = []

    def begin(
        program: str,
        handlers: Mapping[str, Handler] | None = None,
        active: Callable[[int], ThreadSeconds] = active_seconds,
        memory: Callable[[], Memory | None] = lambda: None,
        expendable: bool = False,
    ) -> Child:
        (tmp_path / "program_of_the_test.py").write_text(_HEAD + program)
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), *map(str, [Path.cwd()])])
        child = Child(
            "the child",
            "program_of_the_test",
            handlers or {},
            lambda peer: None,
            lambda: lost.append(clock.now),
            environment={**os.environ, "PYTHONPATH": path},
            clock=clock,
            active=active,
            memory=memory,
            expendable=expendable,
        )
        children.append(child)
        return child

    yield begin
    for child in children:
        child.retire()
        child.kill()
        child.wait(20)


def buried(child: Child, lost: list[float], times: int) -> None:
    """Wait until the child has died ``times`` times."""

    def tended() -> bool:
        child.maintain()
        return len(lost) == times

    until(tended, 30, "its death")


def pass_time(child: Child, clock: Clock, seconds: float) -> None:
    """Let ``seconds`` pass, with a child that is tended all the time."""
    for _ in range(round(seconds / PING_SECONDS)):
        clock.now += PING_SECONDS
        child.maintain()


def answered(child: Child, clock: Clock) -> None:
    """Wait until the child has answered all pings, that of this moment included."""
    clock.now += PING_SECONDS
    child.maintain()
    assert child.peer is not None
    child.peer.ask("ping").result(30)  # it answers in order


def killed(child: Child) -> bool:
    return child.peer is None or ((asked := child.peer.ask("ping")).done() and asked.exception() is not None)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("lack", "why"),
    [
        (no_more_files, "[Errno 24] Too many open files"),
        (lambda: no_more_files(but=2), "[Errno 24] Too many open files"),  # besides the pair of sockets
        (lambda: no_more_threads("reader"), "can't start new thread"),
    ],
)
def test_a_child_that_cannot_be_started_is_tried_again_with_growing_pauses(
    lack: Callable[[], AbstractContextManager[None]],
    why: str,
    keep: Keep,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The parent continues: a server serves without its shadow, and a supervisor has other workers."""
    child = keep("time.sleep(600)")
    opened, before = open_files(), children_of(os.getpid())
    for pause in (0.25, 0.5, 1.0):
        with lack():
            child.maintain()
        assert (child.pid, child.peer) == (None, None)
        last = caplog.messages[-1]
        assert last.startswith(f"the child cannot be started: {why}")
        assert last.endswith(f"; trying again in {pause:g} s")
        clock.now += pause - 0.01
        child.maintain()
        assert child.pid is None, "not yet"
        clock.now += 0.02
    assert open_files() <= opened, "nothing is left open"
    assert children_of(os.getpid()) == before, "nor running"
    child.maintain()
    assert child.pid is not None


def test_a_child_that_had_answered_for_long_is_restarted_at_once(keep: Keep, clock: Clock, lost: list[float]) -> None:
    child = keep(_ANSWERS + "time.sleep(600)")
    child.maintain()
    for _ in range(12):
        answered(child, clock)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    buried(child, lost, 1)
    child.maintain()
    assert child.pid not in (None, first)


@pytest.mark.parametrize("program", ["sys.exit(3)", "time.sleep(600)"])
def test_a_child_that_dies_early_or_never_answers_is_restarted_after_growing_pauses(
    program: str, keep: Keep, clock: Clock, lost: list[float]
) -> None:
    """It has two minutes to import: longer if others use the processors. Restarts at once would take more of them."""
    child = keep(program, active=lambda pid: {})
    child.maintain()
    for times, pause in enumerate((0.25, 0.5, 1.0, 2.0), 1):
        if "sleep" in program:
            pass_time(child, clock, START_SECONDS)
            assert not killed(child)
            pass_time(child, clock, 2)
        buried(child, lost, times)
        clock.now += pause - 0.01
        child.maintain()
        assert child.pid is None, "not yet"
        clock.now += 0.02
        child.maintain()
        assert child.pid is not None


def test_a_child_that_stops_while_it_imports_is_waited_for_and_killed_if_it_stops_later(
    keep: Keep, clock: Clock, lost: list[float]
) -> None:
    child = keep("os.kill(os.getpid(), signal.SIGSTOP)\n" + _ANSWERS + "time.sleep(600)")
    child.maintain()
    pid = child.pid
    assert pid is not None
    until(lambda: is_stopped(pid), 30, "its stop")
    pass_time(child, clock, 5 * SILENT_SECONDS)
    assert child.pid == pid
    os.kill(pid, signal.SIGCONT)
    answered(child, clock)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_stopped(pid), 30, "its second stop")
    pass_time(child, clock, SILENT_SECONDS)
    assert not killed(child)
    pass_time(child, clock, 3)
    buried(child, lost, 1)
    child.maintain()
    assert child.pid not in (None, pid), "and it is replaced at once"


def is_stopped(pid: int) -> bool:
    """Tell whether all threads are stopped: one that is not yet still answers pings."""
    return all("\nState:\tT" in status.read_text() for status in Path(f"/proc/{pid}/task").glob("*/status"))


def test_a_child_is_not_killed_for_the_time_in_which_the_parent_was_paused(keep: Keep, clock: Clock) -> None:
    """The parent may be paused with its container: otherwise it would kill all its children at once."""
    child = keep(_ANSWERS + "time.sleep(600)", active=lambda pid: {})
    child.maintain()
    answered(child, clock)
    clock.now += 10 * SILENT_SECONDS
    child.maintain()
    assert not killed(child)
    answered(child, clock)


def test_a_busy_child_that_does_not_respond_has_two_minutes(keep: Keep, clock: Clock, lost: list[float]) -> None:
    """A child that reads a large model does not respond, because Python's lock is held meanwhile."""
    child = keep(_ANSWERS + "time.sleep(600)", active=lambda pid: {pid: clock.now / 5})
    child.maintain()
    answered(child, clock)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    until(lambda: is_stopped(first), 30, "its stop")
    begun = clock.now
    while clock.now < begun + 12 * SILENT_SECONDS - 1:
        clock.now += 0.5
        child.maintain()
        assert not killed(child)
    for _ in range(6):
        clock.now += 0.5
        child.maintain()
    buried(child, lost, 1)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel keeps no scheduler statistics")
def test_a_process_that_waits_for_a_processor_counts_as_active() -> None:
    """Two processes share a processor with one that may run only when they do not."""
    one = min(os.sched_getaffinity(0))
    place = f"import os; os.sched_setaffinity(0, [{one}])\n"
    idle = place + "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
    programs = [place, place, idle]
    processes = [subprocess.Popen([sys.executable, "-c", program + "while True: pass"]) for program in programs]
    try:
        waiting = processes[-1].pid
        until(lambda: sum(active_seconds(waiting).values()) >= 1, 60, "a second of activity")
        ran = int(Path(f"/proc/{waiting}/schedstat").read_text().split()[0]) / 1e9
        assert ran < 0.6, "most of it was waiting"
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_process_that_is_stopped_or_has_ended_is_not_active() -> None:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until(lambda: sum(active_seconds(process.pid).values()) > 0.1)
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: is_stopped(process.pid))
        before, until_worked = active_seconds(process.pid), time.process_time() + 0.1
        while time.process_time() < until_worked:
            pass
        assert active_seconds(process.pid) == before
    finally:
        process.kill()
        process.wait()
    assert active_seconds(process.pid) == {}


def test_nothing_is_imported_from_the_working_directory(
    keep: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    child = keep(_ANSWERS + "time.sleep(600)", {"hello": lambda message: heard.append(message.body["directory"])})
    monkeypatch.chdir(elsewhere)
    child.maintain()
    until(lambda: heard)
    assert heard[0] not in ("", str(elsewhere))


@pytest.mark.parametrize(
    ("number", "killed_for_memory", "reason"),
    [
        (signal.SIGSEGV, 1, "killed by SIGSEGV; restarting it"),
        (40, 0, "killed by signal 40; restarting it"),  # Python has no name for most real-time signals
        (signal.SIGKILL, 0, "killed by SIGKILL; restarting it"),
        (signal.SIGKILL, 1, "killed by SIGKILL because memory ran out, of which this container may"),
    ],
)
def test_the_log_says_what_ended_a_child(
    number: int,
    killed_for_memory: int,
    reason: str,
    keep: Keep,
    lost: list[float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The container's control group counts kills for memory; the count also has earlier kills of other processes."""
    counts = itertools.chain([7], itertools.repeat(7 + killed_for_memory))
    memory = lambda: Memory(limit=1 << 30, left=0, oom_kills=next(counts))  # noqa: E731
    buried(keep(f"os.kill(os.getpid(), {int(number)})", memory=memory), lost, 1)
    assert f"has ended: {reason}" in caplog.messages[-1]


def test_a_retired_child_is_not_restarted(keep: Keep, clock: Clock, lost: list[float]) -> None:
    child = keep("time.sleep(600)")
    child.maintain()
    child.retire()
    child.kill()
    buried(child, lost, 1)
    clock.now += 100
    child.maintain()
    assert child.pid is None


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has it")
@pytest.mark.parametrize("expendable", [False, True])
def test_an_expendable_child_is_killed_first_if_memory_runs_out(expendable: bool, keep: Keep) -> None:
    own = Path("/proc/self/oom_score_adj").read_text()
    child = keep("time.sleep(600)", expendable=expendable)
    child.maintain()
    assert Path(f"/proc/{child.pid}/oom_score_adj").read_text() == ("1000\n" if expendable else own)
