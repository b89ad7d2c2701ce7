"""Memory of a conversion, step by step, as its steps are said on stderr."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.core import models

_SAMPLE_S = 0.002
_STEP_PREFIX = "bf16-convert: "


@dataclass(frozen=True, slots=True)
class Memory:
    """The largest seen during one step, in bytes: the process' own, and that of mapped files."""

    anonymous: int = 0
    mapped: int = 0


def peaks(arguments: Sequence[str]) -> dict[str, Memory]:
    """Peaks of ``python -m bench.conversion.process`` with ``arguments``, by step; "" is before the first."""
    command = [sys.executable, "-m", "bench.conversion.process", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(models.ROOT)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=models.ROOT, env=environment)
    step, found, lines = [""], {"": Memory()}, list[str]()

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            name = line.removeprefix(_STEP_PREFIX).strip()
            if line.startswith(_STEP_PREFIX) and ": " not in name:  # not one of the lines that say how far a step is
                step[0] = name

    listener = threading.Thread(target=listen)
    listener.start()
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        if "RssAnon" in fields:  # absent once the process is ending
            before = found.get(step[0], Memory())
            anonymous, mapped = max(before.anonymous, _bytes(fields["RssAnon"])), _bytes(fields["RssFile"])
            found[step[0]] = Memory(anonymous, max(before.mapped, mapped))
        time.sleep(_SAMPLE_S)
    listener.join()
    if process.returncode:
        raise RuntimeError(f"the conversion failed with exit code {process.returncode}:\n{''.join(lines)[-4000:]}")
    return found


def _bytes(kilobytes: str) -> int:
    return int(kilobytes.split()[0]) * 1024
