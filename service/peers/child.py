"""A child process of this server that is kept running: started, pinged, and started again after it has died."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from bf16kit.service.peers.channel import Channel
from bf16kit.service.peers.peer import Handler, Peer
from bf16kit.system import controlgroup
from bf16kit.system.exit_with_parent import exit_with_parent

_log = logging.getLogger(__name__)
#: Seconds per thread, by thread id. The counts of different moments can be compared with :func:`grown`.
ThreadSeconds = Mapping[int, float]
PING_SECONDS = 1.0
SILENT_SECONDS = 10.0  # without an answer, after which it counts as hung and is killed
# Until the first answer a process imports: 2 s of processor time, which take long where processors are scarce.
START_SECONDS = 120.0
# A busy process has longer by this factor: ONNX Runtime holds Python's lock while it reads a large model.
_BUSY_FACTOR = 12.0
# Of the time: a process whose threads ran, or waited for a processor, for more than this share counts as busy. The
# threads of one that is stuck wake up now and then, which takes less than a hundredth.
_BUSY_SHARE = 0.1
# A process that has answered for at least this long is restarted at once; otherwise the pause grows with each failure.
_SETTLED_SECONDS = 10.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 30.0


def active_seconds(pid: int) -> ThreadSeconds:
    """Return for how long each thread of a process has run, or was ready to run and waited for a processor.

    A kernel without ``schedstat`` (CONFIG_SCHED_INFO) tells only how long the whole process has run. Empty if the
    process has ended.
    """
    found: dict[int, float] = {}
    with suppress(OSError, ValueError):  # it has ended, or one of its threads has
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError, ValueError):
                # /proc/PID/schedstat has the main thread only.
                ran, waited, _ = (task / "schedstat").read_text().split()
                found[int(task.name)] = (int(ran) + int(waited)) / 1e9
    return found or _cpu_seconds(pid)


def grown(before: ThreadSeconds, after: ThreadSeconds) -> float:
    """Return by how many seconds the counts have grown. A thread that has ended meanwhile counts as 0."""
    return sum(max(0.0, seconds - before.get(thread, 0.0)) for thread, seconds in after.items())


def _cpu_seconds(pid: int) -> ThreadSeconds:
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except (OSError, ValueError):
        return {}
    return {pid: (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")}


class Child:
    """A process that runs ``module``, and its peer.

    Call :meth:`maintain` periodically, always on the same thread. That thread must live as long as the child, which the
    kernel kills with its parent thread.

    ``on_start`` is called with the peer of each started process, before its first message is handled; ``on_death`` when
    a process has died. Both run on the maintaining thread, ``handlers`` on the peer's thread. If memory runs out, in
    the container or on the machine, the kernel kills an ``expendable`` process first.
    """

    def __init__(
        self,
        name: str,
        module: str,
        handlers: Mapping[str, Handler],
        on_start: Callable[[Peer], None],
        on_death: Callable[[], None],
        *,
        environment: Mapping[str, str] | None = None,
        silent_seconds: float = SILENT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        active: Callable[[int], ThreadSeconds] = active_seconds,
        memory: Callable[[], controlgroup.Memory | None] = controlgroup.memory,
        expendable: bool = False,
    ) -> None:
        self.name = name
        self.peer: Peer | None = None  # the peer of the running process
        self._module = module
        self._handlers = handlers
        self._on_start = on_start
        self._on_death = on_death
        self._environment = environment
        self._silent_seconds = silent_seconds
        self._clock = clock
        self._active = active  # of a process, by its pid
        self._active_before: ThreadSeconds = {}  # when its last answer came
        self._memory = memory  # of the container of all processes
        self._expendable = expendable
        self._ended_for_memory = 0  # processes of the container killed for memory, before this one started
        self._process: subprocess.Popen[bytes] | None = None
        self._peer_ended = False  # the peer has ended
        self._due = clock()  # when to start the next one
        self._last_answer = self._pinged = self._tended = 0.0
        self._first_answer: float | None = None
        self._failures = 0
        self._wanted = True

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def maintain(self) -> None:
        """Do what is due: start the process, ping it, kill it, or clean up after its death."""
        now = self._clock()
        if self._process is None:
            if self._wanted and now >= self._due:
                try:
                    self._start(now)
                except Exception as error:  # noqa: BLE001 -- out of files, processes, threads or memory: not for long
                    self._give_up(now, error)
            return
        # Do not count the time in which this process itself was paused (with its container): it could hear no answer.
        self._last_answer += max(0.0, now - self._tended - PING_SECONDS)
        self._tended = now
        if self._process.poll() is not None and self.peer is not None:
            self.peer.close()
        if self._peer_ended:
            self._clean_up(now)
        elif self._is_hung(now - self._last_answer):
            _log.error(
                "%s (pid %d) has not answered for %.0f s; killing it", self.name, self.pid, now - self._last_answer
            )
            self.kill()
        elif now - self._pinged >= PING_SECONDS and self.peer is not None:
            self._pinged = now
            self.peer.ask("ping").add_done_callback(lambda done: None if done.exception() else self._on_answer())

    def retire(self) -> None:
        """Do not start another process when this one ends."""
        self._wanted = False

    def kill(self) -> None:
        """Kill the process at once; the next :meth:`maintain` cleans up."""
        if self._process is not None:
            self._process.kill()
            if self.peer is not None:
                self.peer.close()

    def wait(self, seconds: float) -> bool:
        """Wait for the process to end; kill it after ``seconds``. Returns whether it ended by itself."""
        if self._process is None:
            return True
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
            return False
        if self.peer is not None:
            self.peer.close()
        return True

    def _on_answer(self) -> None:
        self._last_answer = self._clock()
        if self._first_answer is None:
            self._first_answer = self._last_answer
        if (pid := self.pid) is not None:
            self._active_before = self._active(pid)

    def _is_hung(self, seconds: float) -> bool:
        """Return whether the process is to be killed, after so many seconds without an answer."""
        limit = self._silent_seconds
        if self._first_answer is None:
            limit = max(limit, START_SECONDS)
        if self.pid is None or seconds <= limit:
            return False
        if seconds > _BUSY_FACTOR * self._silent_seconds:
            return True
        return grown(self._active_before, self._active(self.pid)) <= _BUSY_SHARE * seconds

    def _start(self, now: float) -> None:
        """Start a process. Raises OSError, or RuntimeError without a thread; after any error nothing is left behind."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        peer = Peer(Channel(ours), self.name, self._handlers, self._ended)
        try:
            with theirs:
                # -P: do not import from the working directory. The child ends itself when this process has died
                # (bf16kit/system/exit_with_parent.py), and ignores stop signals: this process handles them.
                command = [sys.executable, "-P", "-m", self._module, str(theirs.fileno()), str(os.getpid())]
                self._ended_for_memory = 0 if (memory := self._memory()) is None else memory.oom_kills
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=None if self._environment is None else dict(self._environment),
                )
            if self._expendable:
                controlgroup.maximize_oom_score(self._process.pid)
            self._peer_ended, self._active_before, self._first_answer = False, {}, None
            self._last_answer = self._pinged = self._tended = now
            self.peer = peer
            _log.info("%s is started: pid %d", self.name, self._process.pid)
            self._on_start(peer)
            peer.start()
        except BaseException:
            process, self._process, self.peer = self._process, None, None
            peer.abandon()
            if process is not None:
                process.kill()
                process.wait()
            raise

    def _ended(self) -> None:
        self._peer_ended = True

    def _clean_up(self, now: float) -> None:
        assert self._process is not None  # noqa: S101 -- for the type checker
        self._process.kill()  # without its channel a process is useless
        code = self._process.wait()
        pid, self._process, self.peer = self._process.pid, None, None
        settled = self._first_answer is not None and now - self._first_answer >= _SETTLED_SECONDS
        pause = self._pause(now, 0 if settled else self._failures + 1)
        wanted, reason = self._wanted, _exit_reason(code) + self._for_memory(code)
        self._on_death()
        if wanted:
            then = f"restarting it in {pause:.2g} s" if self._wanted else "it is not restarted"
            _log.error("%s (pid %d) has ended: %s; %s", self.name, pid, reason, then)

    def _for_memory(self, code: int) -> str:
        """Name lack of memory as the cause: SIGKILL ended the process, and memory ran out since its start."""
        memory = self._memory()
        if code != -signal.SIGKILL or memory is None or memory.oom_kills <= self._ended_for_memory:
            return ""
        return f" because memory ran out, of which this container may take {memory.limit / 1e6:.0f} MB"

    def _give_up(self, now: float, error: Exception) -> None:
        """Log that the process could not be started, and schedule another attempt."""
        pause = self._pause(now, self._failures + 1)
        bug = not isinstance(error, (OSError, RuntimeError, MemoryError))
        _log.error("%s cannot be started: %s; trying again in %.2g s", self.name, error, pause, exc_info=bug)

    def _pause(self, now: float, failures: int) -> float:
        """Schedule the next start after ``failures`` consecutive failures; return the pause in seconds."""
        self._failures = failures
        pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** (failures - 1)) if failures else 0.0
        self._due = now + pause
        return pause


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # Python has no names for most real-time signals
        return f"killed by signal {-code}"


def socket_to_parent() -> socket.socket:
    """Return the child's end of the channel, for its ``main``. The process ends with its parent from now on.

    It ignores the parent's stop signals: Ctrl-C, systemd and a terminal that closes signal every process of a server,
    and the parent stops the others.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    exit_with_parent(int(sys.argv[2]))
    return socket.socket(fileno=int(sys.argv[1]))
