"""What sessions cost: an idle one, and the import."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import graphs
from bf16kit.runtime.ort.session import Session, open_session

_QUIET, _TRIES = 0.1, 20  # seconds


def idle_cost(session: Session) -> float:
    """Return the processor time (seconds) used in the ``_QUIET`` seconds after a run: the least of some tries."""
    feeds = {"x": graphs.values(64, 256)}
    costs = []
    for _ in range(_TRIES):
        session.run(None, feeds)
        before = time.process_time()
        time.sleep(_QUIET)
        costs.append(time.process_time() - before)
        if costs[-1] < _QUIET / 100:
            break
    return min(costs)


@pytest.mark.alone  # spinning threads show in the processor time only if cores are free for them
@pytest.mark.parametrize("threads", [2, 4])
def test_an_idle_session_takes_no_processor_time(threads: int) -> None:
    """The pool's threads sleep between runs; they do not spin."""
    model = graphs.mlp((256, 256, 256)).SerializeToString()
    assert idle_cost(open_session(model, threads=threads)) < _QUIET / 100


def test_nothing_is_written_to_the_home_directory(tmp_path: Path) -> None:
    """With its default settings, ONNX Runtime's telemetry writes a device id to ~/.cache at import."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", "import bf16kit.runtime.ort.onnx"],
        env=environment | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.rglob("*")) == []
