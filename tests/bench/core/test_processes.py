"""The processor time of a server includes its child processes, because some peers work in children."""

import subprocess
import sys

import pytest

from bench.core.processes import Server

BUSY = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\ninput()"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}])"


@pytest.mark.long
def test_the_time_of_children_counts() -> None:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        assert 0.5 <= Server(process, 0, 0.0).cpu_seconds() < 5
    finally:
        process.communicate("\n", timeout=30)


def test_the_time_of_a_process_that_has_ended_is_zero() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], text=True)
    process.wait()
    assert Server(process, 0, 0.0).cpu_seconds() == 0
