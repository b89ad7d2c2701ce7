"""The cost of an idle session."""

from __future__ import annotations

import time

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
