"""``bf16-serve`` as users run it: a process, with its ports read from its log, and an exit code at the end."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import tritonclient.grpc as triton
from logfile import LogFile
from tritonclient.utils import np_to_triton_dtype
from waiting import until

_BANNER = re.compile(r"gRPC on \S+ port (\d+); metrics and status page on https?://\S+:(\d+)/")
_OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]  # which any worker may accept
HOLDS_AT_MOST = 1536 << 20  # bytes: with default settings, a server fits in a container of 2 GB whatever clients do


class Log(Protocol):
    """Where a server writes its log, and what of it has been read."""

    @property
    def text(self) -> str: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class ServerProcess:
    """A running server and its log. Its ports are free ones, unless arguments name others. A context manager."""

    def __init__(
        self,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        program: Path | None = None,
        log: Log | None = None,
    ) -> None:
        """``env`` are variables beside this process' own; ``program`` is a Python file in place of ``bf16-serve``."""
        own = [Path(sys.executable).with_name("bf16-serve")]
        command = [*(own if program is None else [sys.executable, program]), "--grpc-port", "0", "--http-port", "0"]
        self._log = log or LogFile()
        self.process = subprocess.Popen(
            [str(word) for word in (*command, *arguments)],
            stderr=self._log.fileno(),
            env={**os.environ, **(env or {})},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

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

    def infer(self, model: str, feeds: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Send a request over a new connection; ``options`` are those of tritonclient. Return the outputs by name."""
        inputs = []
        for name, array in feeds.items():
            inputs.append(triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
        with triton.InferenceServerClient(self.target, channel_args=_OWN_CONNECTION) as client:
            answer = client.infer(model, inputs, **options)
            return {output.name: answer.as_numpy(output.name) for output in answer.get_response().outputs}

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

    def of_model(self, name: str, model: str = "mlp", version: int = 1, **labels: str) -> float:
        """Return the value of a series of a model's version; −1 if it does not exist."""
        every = sorted({**labels, "model": model, "version": str(version)}.items())
        return self.metric(f"bf16kit_{name}" + "{" + ",".join(f'{label}="{value}"' for label, value in every) + "}")

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

    def wait_ready(self) -> Self:
        until(lambda: self.get("/readyz")[0] == 200, 60, "ready")
        return self

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        return self.process.wait(60)

    def stop(self, code: int = 0) -> None:
        """Send SIGTERM, and check the exit code."""
        self.terminate()
        assert self.exit_code() == code, self.log

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.exit_code()
        self._log.close()


Serve = Callable[..., ServerProcess]
