"""The demo waits for progress: a busy machine is slow, and no failure."""

from __future__ import annotations

import itertools
import socket
import subprocess
import time
from pathlib import Path

import pytest
import running
from running import DemoFailed, wait


def test_a_slow_step_is_waited_for_as_long_as_it_moves() -> None:
    steps = itertools.count()
    begun = time.monotonic()
    assert wait("it", lambda: time.monotonic() - begun > 0.6, lambda: str(next(steps)), patience=0.2)


def test_a_step_that_does_not_move_fails_with_how_far_it_came() -> None:
    with pytest.raises(DemoFailed, match=r"waited for it; nothing has changed for 0 s: 12 are done"):
        wait("it", lambda: None, lambda: "12 are done", patience=0.1)


def test_a_server_that_does_not_come_to_answer_is_not_ready_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port listens, and nobody accepts."""
    monkeypatch.setattr(running, "ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert not running.is_ready(process, silent.getsockname()[1], tmp_path / "log")
        finally:
            process.kill()
