"""Runs TensorFlow in a separate process: its requests, limits of time and memory, and reports of its failures."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from bf16kit.messages.errors import RuntimeFailure, UsageError
from bf16kit.messages.wording import brief
from bf16kit.runtime.memory.scratch import on_disk
from bf16kit.system import controlgroup
from converter.read.tensorflow.environment import Environment, variables
from converter.source import Array, Feeds

SECONDS = "BF16KIT_TENSORFLOW_SECONDS"
_SECONDS = 3600.0  # for one request: translating a large model takes minutes
_SCRIPT = Path(__file__).with_name("child.py")
_PREFIX, _LOCK = "bf16kit-tensorflow-", "lock"
_LONGEST_REPLY = 1 << 20  # bytes
_TAIL = 8 << 10  # bytes of its last output to search for a message
_QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "-1",  # the reference outputs are those of a CPU
    "KERAS_BACKEND": "tensorflow",
}


class TensorFlowError(Exception):
    """TensorFlow rejected a request, died or did not respond; the message says which, for users."""


class TensorFlowProcess:
    """The process, and a directory of its own for exchanging files; both end with this object.

    Raises :class:`TensorFlowError` when it cannot be started. ``seconds`` limits each request, ``memory`` (bytes) its
    data.
    """

    def __init__(self, environment: Environment, seconds: float | None = None, memory: int | None = None) -> None:
        self._seconds = seconds if seconds is not None else _time_limit()
        self.directory, lock = _directory()
        self._output_path = self.directory / "said"
        try:
            with self._output_path.open("wb") as output:
                self._process = subprocess.Popen(
                    [str(environment.python), str(_SCRIPT)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    cwd=self.directory,
                    env={**variables(), **_QUIET, "KERAS_HOME": str(self.directory), "TMPDIR": str(self.directory)},
                    start_new_session=True,  # so that processes it starts are killed with it
                    bufsize=0,
                )
        except OSError as error:
            _remove(self.directory, lock)
            raise TensorFlowError(f"{environment.python} cannot be started: {error.strerror}") from None
        self.close = weakref.finalize(self, _terminate, self._process, self.directory, lock)
        reply = self.ask("start", memory=_memory_limit() if memory is None else memory)
        self.versions: dict[str, str] = _texts(reply.get("versions"))

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send one request and return the reply; :class:`TensorFlowError` if there is none or it reports an error."""
        request = json.dumps({"do": do, **arguments}).encode() + b"\n"
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        try:
            self._process.stdin.write(request)
        except BrokenPipeError:
            raise TensorFlowError(self._death_message()) from None
        line = self._read_line(time.monotonic() + self._seconds)
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise self._protocol_error(f"sent an invalid reply: {brief(line[:200].decode(errors='replace'))}")
        if "error" in reply:
            raise TensorFlowError(brief(reply["error"], 1000))
        return reply

    def outputs(self, feeds: Sequence[Feeds], outputs: Sequence[str]) -> Iterator[Feeds]:
        """Yield the opened signature's outputs for each of ``feeds``. Raises :class:`RuntimeFailure`."""
        for feed in feeds:
            feed_files = {name: self.directory / f"feed-{index}.npy" for index, name in enumerate(feed)}
            for name, file in feed_files.items():
                np.save(file, feed[name], allow_pickle=False)
            output_files = {name: self.directory / f"answer-{index}.npy" for index, name in enumerate(outputs)}
            try:
                self.ask("answer", feeds=_strings(feed_files), answers=_strings(output_files))
            except TensorFlowError as error:
                raise RuntimeFailure(f"TensorFlow failed on it: {error}") from None
            yield {name: _loaded(file) for name, file in output_files.items()}

    def _read_line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        line = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                left = deadline - time.monotonic()  # limits the whole line, even one that arrives byte by byte
                if left <= 0 or not selector.select(left):
                    raise self._protocol_error(
                        f"did not answer within {self._seconds:g} s; set the environment variable {SECONDS} to"
                        " allow more"
                    )
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    raise TensorFlowError(self._death_message())
                line += part
                if len(line) > _LONGEST_REPLY:
                    raise self._protocol_error(f"sent more than {_LONGEST_REPLY} bytes")
        return bytes(line)

    def _protocol_error(self, what: str) -> TensorFlowError:
        """End the process, because its output can no longer be trusted, and return the error."""
        self.close()
        return TensorFlowError(f"TensorFlow's process {what}")

    def _death_message(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)  # its output is closed, so it is about to end
        code, last_output = self._process.poll(), _tail(self._output_path)
        self.close()
        ending = "closed its output" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            ending = f"was killed by {_signal(-code)}"
            if -code in (signal.SIGKILL, signal.SIGABRT):
                ending += " (out of memory?)"
        return f"TensorFlow's process {ending}" + (f"; its last output: {last_output}" if last_output else "")


def _texts(value: object) -> dict[str, str]:
    return {str(key): str(text)[:40] for key, text in value.items()} if isinstance(value, dict) else {}


def _strings(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: str(file) for name, file in files.items()}


def _loaded(file: Path) -> Array:
    """Load an array that the process wrote; mapped first, so that a false header allocates no memory."""
    try:
        array = np.array(np.load(file, mmap_mode="r", allow_pickle=False))
        file.unlink()
    except (OSError, ValueError, EOFError) as error:
        raise RuntimeFailure(f"TensorFlow's answer cannot be read: {brief(error)}") from None
    return array


def _time_limit() -> float:
    text = os.environ.get(SECONDS, str(_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{SECONDS}={text}: expected a number of seconds above 0")
    return seconds


def _memory_limit() -> int:
    """Return the memory of the machine, or of the container, in bytes.

    It becomes the process' limit, so that a larger allocation fails before the system kills something.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    container = controlgroup.memory()
    return machine if container is None else min(machine, container.limit)


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return brief(next((line.strip() for line in reversed(lines) if line.strip()), ""))


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _directory() -> tuple[Path, IO[bytes]]:
    """Create a directory and a lock that shows that it is in use; remove directories of killed processes."""
    parent = on_disk()
    for stale in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if stale.lstat().st_uid == os.getuid():
                _remove_stale(stale)
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = (directory / _LOCK).open("xb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock.fileno()).st_nlink:  # no other process took it for stale before it was locked
            return directory, lock
        lock.close()


def _remove_stale(directory: Path) -> None:
    with (directory / _LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)


def _remove(directory: Path, lock: IO[bytes]) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    lock.close()


def _terminate(process: subprocess.Popen[bytes], directory: Path, lock: IO[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()
    _remove(directory, lock)
