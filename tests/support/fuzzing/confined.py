"""Run a conversion in a forked process, limit its memory and time, and watch every file that it opens."""

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEMORY = 2 << 30  # bytes beyond what the process had when it was forked
_CHILDREN = [["-P", "-m", "bf16kit.converter.process.onnx_trial"]]
SECONDS = 10  # of processor time
PATIENCE = 60  # wall-clock seconds after which a mutant is killed: the machine may be busy


@dataclass(frozen=True)
class End:
    """How a confined call ended: its result or the signal that killed it, its output, and the resources it used."""

    result: Any  # the returned value, after a round trip through JSON; None after a signal
    signal: int
    output: str
    outside: tuple[str, ...]
    wall: float  # seconds
    processor: float  # seconds
    memory: int  # peak bytes, beyond those of the parent process

    @property
    def late(self) -> bool:
        """Whether the call took more than :data:`SECONDS` of processor time or :data:`PATIENCE` of wall-clock time."""
        return self.processor > SECONDS or self.wall >= PATIENCE or self.signal == signal.SIGXCPU


def call(action: Callable[[Callable[[], None]], Any], inside: Path) -> End:
    """Run ``action`` in a forked process that should write only below ``inside/out``; other writes are reported.

    ``action`` receives a function that stops the watch. It calls that function before it judges its own result.
    """
    output_file, answer = inside / "said", inside / "answer"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _confined(action, inside, output_file, answer)
    status, usage = _wait(child, started + PATIENCE)
    code = os.waitstatus_to_exitcode(status)
    answered = json.loads(answer.read_text()) if answer.is_file() and code == 0 else {"result": None, "outside": []}
    return End(
        answered["result"],
        -code if code < 0 else 0 if code == 0 else signal.SIGABRT,
        output_file.read_text(errors="replace") if output_file.is_file() else "",
        tuple(answered["outside"]),
        time.monotonic() - started,
        usage.ru_utime + usage.ru_stime,
        max(0, usage.ru_maxrss - before) << 10,
    )


def _wait(child: int, deadline: float) -> tuple[int, resource.struct_rusage]:
    descriptor = os.pidfd_open(child)
    try:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(descriptor)
    _, status, usage = os.wait4(child, 0)
    return status, usage


def _confined(action: Callable[[Callable[[], None]], Any], inside: Path, output_file: Path, answer: Path) -> None:
    """Run in the forked process; never returns."""
    code = 70
    with contextlib.suppress(BaseException):
        output = os.open(output_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(output, "w", encoding="utf-8", errors="backslashreplace", buffering=1)
        sys.dont_write_bytecode = True
        os.chdir(inside)
        (inside / "out" / "tmp").mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(inside / "out" / "tmp")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.tempdir  # else torch uses the one it found before the fork
        watch = Watch(inside)
        _limit()
        result = None
        try:
            result = action(watch.stop)
        except BaseException as error:  # noqa: BLE001 - every failure is reported to the parent
            result = {"escaped": f"{type(error).__name__}: {error}"}
        watch.stop()
        _unlimited()
        answer.write_text(json.dumps({"result": result, "outside": watch.found}))
        code = 0
    os._exit(code)


def _limit() -> None:
    status = Path("/proc/self/status").read_text().splitlines()
    used = int(next(line.split()[1] for line in status if line.startswith("VmData")))  # KiB
    resource.setrlimit(resource.RLIMIT_DATA, ((used << 10) + MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _unlimited() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Watch:
    """Report each file that Python opens, creates, renames or removes outside the paths that a conversion may use."""

    _WRITES = (
        "os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.link", "os.symlink", "os.truncate", "os.chmod",
        "os.chown", "shutil.rmtree",
    )  # fmt: skip
    _NEVER = (
        "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "socket.connect",
        "socket.getaddrinfo", "urllib.Request",
    )  # fmt: skip

    def __init__(self, inside: Path) -> None:
        self.found: list[str] = []
        self._inside = os.path.realpath(inside)
        roots = {sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), *sys.path, f"/proc/{os.getpid()}"}
        roots |= {"/sys/devices/system/cpu", "/sys/fs/cgroup", "/dev/null", "/dev/urandom"}
        roots |= {"/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat"}
        self._readable = tuple(os.path.realpath(root) for root in roots if root)
        self._on = True
        sys.addaudithook(self._hear)

    def stop(self) -> None:
        """Stop watching."""
        self._on = False

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, int):
                return
            writes = bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
            self._check(event, path, writes)
        elif event in self._WRITES:
            for path in arguments[:2] if event in ("os.rename", "os.link", "os.symlink") else arguments[:1]:
                self._check(event, _in_directory(path, arguments[-1]), True)
        elif event in ("os.listdir", "os.scandir"):
            self._check(event, arguments[0] if arguments[0] is not None else ".", False)
        elif event == "subprocess.Popen" and list(arguments[1])[1:4] in _CHILDREN:
            return  # this child has the same memory limit, and the canary sees what it opens
        elif event in self._NEVER:
            self.found.append(f"{event} {arguments[:2]!r}"[:300])

    def _check(self, event: str, path: Any, writes: bool) -> None:
        if isinstance(path, int):
            return
        real = os.path.realpath(os.fsdecode(path))
        if _below(real, self._inside + "/out") or real == "/dev/null":
            return
        if not writes and (_below(real, self._inside) or any(_below(real, root) for root in self._readable)):
            return
        self.found.append(f"{event} {'write' if writes else 'read'} {real}"[:300])


def _in_directory(path: Any, descriptor: Any) -> Any:
    """Return ``path``, made absolute if it is relative to the open directory in the event's last argument."""
    if isinstance(path, int) or not isinstance(descriptor, int) or descriptor < 0:
        return path
    return Path(f"/proc/self/fd/{descriptor}").readlink() / os.fsdecode(path)


def _below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


@contextlib.contextmanager
def directory(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new directory for one call, and remove it afterwards."""
    path = parent / name
    path.mkdir(parents=True)
    (path / "out").mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
