"""``bf16-serve`` as users run it: a process, with its ports read from its log, and an exit code at the end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from logfile import LogFile
from waiting import until

_BANNER = re.compile(r"gRPC on \S+ port (\d+); metrics and status page on https?://\S+:(\d+)/")
HOLDS_AT_MOST = 1536 << 20  # bytes: with default settings, a server fits in a container of 2 GB whatever clients do


class ServerProcess:
    """A running server and its log."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None, program: Path | None = None) -> None:
        """``program`` is a Python file to run in place of ``bf16-serve``."""
        own = [str(Path(sys.executable).with_name("bf16-serve"))]
        command = [*(own if program is None else [sys.executable, str(program)]), *arguments]
        self._log = LogFile()
        self.process = subprocess.Popen(command, stderr=self._log.fileno(), env=env)

    @property
    def log(self) -> str:
        return self._log.text

    @property
    def lines(self) -> list[str]:
        """Return the complete lines of the log, without a last line that is still being written."""
        return self.log.split("\n")[:-1]

    def ports(self) -> tuple[int, int]:
        """Wait until the log names the gRPC and the HTTP port, and return them."""
        until(lambda: _BANNER.search(self.log) or self.process.poll() is not None, 60, "the ports in the log")
        found = _BANNER.search(self.log)
        assert found is not None, self.log
        return int(found[1]), int(found[2])

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.ports()[0]}"

    def get(self, path: str) -> tuple[int, str]:
        """Return the status and the text of a page."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports()[1]}{path}", timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, series: str) -> float:
        """Return the value of one series, named with its labels sorted by name; −1 if it does not exist."""
        found = re.search(rf"^{re.escape(series)} (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else -1.0

    def status(self, field: str) -> int:
        """Return a number from /proc/PID/status: VmRSS (kB), Threads. It is 0 for a process that has ended."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)

    def check_memory(self) -> None:
        """Fail if the process ever exceeded its memory limit. The kernel records the peak, however short it was."""
        peak = self.status("VmHWM") << 10
        assert 0 < peak < HOLDS_AT_MOST, f"the server held {peak >> 20} MiB at its peak"

    def forget_peak(self) -> None:
        """Check the peak so far, and reset it to the memory that the process has now."""
        self.check_memory()
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def wait_ready(self) -> ServerProcess:
        until(lambda: self.get("/readyz")[0] == 200, 60, "ready")
        return self

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.exit_code()
        self._log.close()


Serve = Callable[..., ServerProcess]
