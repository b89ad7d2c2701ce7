"""One process of this server that is kept running: started, told what to do, and started again when it has died."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bf16kit import controlgroup
from service.peers.channel import Channel
from service.peers.peer import Handler, Peer

_log = logging.getLogger(__name__)
PING_SECONDS = 1.0
SILENT_SECONDS = 10.0  # without an answer: it is stopped, or stands still, and is killed
# One that works meanwhile has longer, by this factor: ONNX Runtime holds Python's lock while it reads a large model.
_BUSY_FACTOR = 12.0
_BUSY_SHARE = 0.2  # of one core
# It ran for this long before it died: the next is started at once. One that dies sooner waits, longer each time.
_SETTLED_SECONDS = 10.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 30.0


class Child:
    """:meth:`tend` is to be called again and again, by one thread that lives as long as the child shall.

    ``begin`` is told the peer of each process that was started, before anything of it is heard; ``lost`` that one has
    died. Both run on the thread that tends, ``handlers`` on the peer's. An ``expendable`` one is the first that the
    system ends where memory runs out, in the container or on the machine.
    """

    def __init__(
        self,
        name: str,
        module: str,
        handlers: Mapping[str, Handler],
        begin: Callable[[Peer], None],
        lost: Callable[[], None],
        *,
        environment: Mapping[str, str] | None = None,
        silent_seconds: float = SILENT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[int], float] | None = None,
        memory: Callable[[], controlgroup.Memory | None] = controlgroup.memory,
        expendable: bool = False,
    ) -> None:
        self.name = name
        self.peer: Peer | None = None  # of the process that runs
        self._module = module
        self._handlers = handlers
        self._begin = begin
        self._lost = lost
        self._environment = environment
        self._silent_seconds = silent_seconds
        self._clock = clock
        self._worked = worked or cpu_seconds  # of a process, by its number
        self._worked_before = 0.0  # when it was heard last
        self._memory = memory  # of the container that all processes are in
        self._expendable = expendable
        self._ended_for_memory = 0  # processes of it, when this one was started
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False  # its peer has ended
        self._due = clock()  # when to start the next one
        self._started = self._heard = self._pinged = self._tended = 0.0
        self._failures = 0
        self._wanted = True

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def tend(self) -> None:
        """Whatever is due: start, ping, kill, or take note that it is dead."""
        now = self._clock()
        if self._process is None:
            if self._wanted and now >= self._due:
                try:
                    self._start(now)
                except (
                    OSError,
                    RuntimeError,
                ) as error:  # no file, process, thread or memory is left; later there may be
                    self._give_up(now, error)
            return
        # While this process itself stood still, as in a container that was paused, nobody could have answered it.
        self._heard += max(0.0, now - self._tended - PING_SECONDS)
        self._tended = now
        if self._process.poll() is not None and self.peer is not None:
            self.peer.close()
        if self._over:
            self._bury(now)
        elif now - self._heard > self._silent_seconds and not self._is_busy(now - self._heard):
            _log.error("%s (pid %d) has not answered for %.0f s, and is killed", self.name, self.pid, now - self._heard)
            self.kill()
        elif now - self._pinged >= PING_SECONDS and self.peer is not None:
            self._pinged = now
            self.peer.ask("ping").add_done_callback(lambda done: None if done.exception() else self._hear())

    def retire(self) -> None:
        """Start no other when this one ends."""
        self._wanted = False

    def kill(self) -> None:
        """End it at once; :meth:`tend` takes note of it."""
        if self._process is not None:
            self._process.kill()
            if self.peer is not None:
                self.peer.close()

    def wait(self, seconds: float) -> bool:
        """Whether it had ended by itself within ``seconds``; it is killed then."""
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

    def _hear(self) -> None:
        self._heard = self._clock()
        if (pid := self.pid) is not None:
            self._worked_before = self._worked(pid)

    def _is_busy(self, seconds: float) -> bool:
        """Whether it has worked in these seconds in which it did not answer, and may go on."""
        if self.pid is None or seconds > _BUSY_FACTOR * self._silent_seconds:
            return False
        return self._worked(self.pid) - self._worked_before > _BUSY_SHARE * seconds

    def _start(self, now: float) -> None:
        """Raises OSError, or RuntimeError for want of a thread, with nothing left behind."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        peer = Peer(Channel(ours), self.name, self._handlers, self._ended)
        try:
            with theirs:
                # -P: what lies in the working directory is not to be imported. The process ends itself when this one
                # has died (bf16kit/orphans.py); signals are this one's to take.
                command = [sys.executable, "-P", "-m", self._module, str(theirs.fileno()), str(os.getpid())]
                self._ended_for_memory = 0 if (memory := self._memory()) is None else memory.ended
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=None if self._environment is None else dict(self._environment),
                )
            if self._expendable:
                controlgroup.end_first(self._process.pid)
            self._over, self._worked_before = False, 0.0
            self._started = self._heard = self._pinged = self._tended = now
            self.peer = peer
            _log.info("%s is started: pid %d", self.name, self._process.pid)
            self._begin(peer)
            peer.start()
        except BaseException:
            process, self._process, self.peer = self._process, None, None
            peer.abandon()
            if process is not None:
                process.kill()
                process.wait()
            raise

    def _ended(self) -> None:
        self._over = True

    def _bury(self, now: float) -> None:
        assert self._process is not None  # noqa: S101 -- for the type checker
        self._process.kill()  # a process that has closed its channel is no use any more
        code = self._process.wait()
        pid, self._process, self.peer = self._process.pid, None, None
        settled = now - self._started >= _SETTLED_SECONDS
        pause = self._pause(now, 0 if settled else self._failures + 1)
        if self._wanted:
            why = _why(code) + self._for_memory(code)
            _log.error("%s (pid %d) has ended: %s; it is started again in %.2g s", self.name, pid, why, pause)
        self._lost()

    def _for_memory(self, code: int) -> str:
        """Whether the system has ended a process of the container since this one began, which was killed now."""
        memory = self._memory()
        if code != -signal.SIGKILL or memory is None or memory.ended <= self._ended_for_memory:
            return ""
        return f" for want of memory, of which this container may take {memory.limit / 1e6:.0f} MB"

    def _give_up(self, now: float, error: Exception) -> None:
        """It could not be started: whoever leads it goes on without, and tries again."""
        pause = self._pause(now, self._failures + 1)
        _log.error("%s cannot be started: %s; it is tried again in %.2g s", self.name, error, pause)

    def _pause(self, now: float, failures: int) -> float:
        """Seconds until the next start, after so many failures one after the other."""
        self._failures = failures
        pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** (failures - 1)) if failures else 0.0
        self._due = now + pause
        return pause


def cpu_seconds(pid: int) -> float:
    """The processor's time that a process has taken until now; 0 for one that is gone, or where nobody says."""
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except (OSError, ValueError):
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _why(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
