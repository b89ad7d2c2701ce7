"""The process that has the fp32 references."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from service.drift.shadow import NICENESS
from service.shadow.measuredversion import Outcomes

PRIORITY = """
import os, threading
from service.shadow.references import run_when_idle
run_when_idle()
found = []
thread = threading.Thread(target=lambda: found.append((os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))))
thread.start()
thread.join()
print(*found[0])
"""


def test_outcomes_are_returned_in_order_once_all_are_known() -> None:
    outcomes = Outcomes(3)
    outcomes.record(2, "measured")
    outcomes.record(0, "dropped")
    assert not outcomes.response.done()
    outcomes.record(1, "failed")
    assert outcomes.response.result() == {"outcomes": ["dropped", "failed", "measured"]}


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux has it")
def test_the_process_and_its_threads_have_idle_priority() -> None:
    done = subprocess.run([sys.executable, "-c", PRIORITY], capture_output=True, text=True, check=True)
    scheduler, nice = map(int, done.stdout.split())
    assert scheduler == os.SCHED_IDLE
    assert nice >= NICENESS
