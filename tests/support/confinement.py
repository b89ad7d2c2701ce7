"""Control groups of Linux, in which a test runs a server with as little as a small container has."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serverprocess import ServerProcess
from waiting import until

_ROOT = Path("/sys/fs/cgroup")
_V1_FILES = {"memory.max": "memory.limit_in_bytes", "pids.max": "pids.max"}


class ControlGroup:
    """A control group with one limit, as ``memory.max`` in bytes. It works with both versions of control groups."""

    def __init__(self, limit: str, value: int) -> None:
        controller = limit.partition(".")[0]
        v1 = (_ROOT / controller).is_dir()
        self._path = (_ROOT / controller if v1 else _ROOT) / f"bf16kit-test-{os.getpid()}-{controller}"
        self._limit = self._path / (_V1_FILES[limit] if v1 else limit)
        self._path.mkdir()
        self.change(value)

    def change(self, value: int) -> None:
        self._limit.write_text(str(value))

    def count(self) -> int:
        """Return the processes and threads in it."""
        return int((self._path / "pids.current").read_text())

    def program(self, folder: Path) -> Path:
        """Write a program that enters the group and becomes ``bf16-serve``."""
        file = folder / "confined.py"
        serve = str(Path(sys.executable).with_name("bf16-serve"))
        file.write_text(
            "import os, sys\n"
            f"open({str(self._path / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
            f"os.execv({serve!r}, [{serve!r}, *sys.argv[1:]])\n"
        )
        return file

    def remove(self) -> None:
        """Remove the group, once its processes have ended."""
        until(self._is_removed, what="the end of the group's processes")

    def _is_removed(self) -> bool:
        with contextlib.suppress(OSError):
            self._path.rmdir()
        return not self._path.exists()


@contextlib.contextmanager
def confined(
    limit: str, value: int, folder: Path, *arguments: str | Path
) -> Iterator[tuple[ServerProcess, ControlGroup]]:
    """Yield a server in a control group with this limit; skip the test where none can be made."""
    try:
        group = ControlGroup(limit, value)
    except OSError as error:
        pytest.skip(f"needs the right to create control groups with {limit}: {error}")
    try:
        with ServerProcess(*arguments, program=group.program(folder)) as server:
            yield server, group
    finally:
        group.remove()
