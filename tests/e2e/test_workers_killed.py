"""A server of several processes under load, whose processes are killed one after another."""

import os
import random
import signal
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_mlp
from asking import RequestLoop, code_of
from serverprocess import Serve, ServerProcess
from waiting import until
from workerprocesses import SHADOW, Client, alive, pids, wait_replaced

KILLS = 12
SIGNALS = [*[signal.SIGKILL] * 4, signal.SIGRTMIN + 6]  # Python has no name for the last
FEEDS = {"x": np.random.default_rng(0).standard_normal((1, 16)).astype(np.float32)}


def processes(server: ServerProcess) -> list[int]:
    return [*pids(server), *pids(server, SHADOW)]


def open_files(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


@pytest.mark.long
def test_a_server_survives_many_deaths_of_its_processes_and_leaves_nothing_behind(tmp_path: Path, serve: Serve) -> None:
    """After each it serves again; every response is right or UNAVAILABLE; no open file or process is left over.

    The shadow stays off after its third death.
    """
    choice = random.Random(47)
    write_mlp(tmp_path / "mlp" / "1", logits=True)
    (tmp_path / "mlp" / "serving.yaml").write_text("shadow: {rate: 1.0, max_per_second: 1000}\n")
    server = serve("--repository", tmp_path, "--workers", "2").wait_ready()
    with Client(server.target) as client:
        expected = client.infer(x=FEEDS["x"])
    until(lambda: len(processes(server)) == 3, 60, "the shadow, which the first sample starts")
    opened, seen = open_files(server), set(processes(server))
    with ExitStack() as stack:
        loops = [RequestLoop(server.target, "mlp", FEEDS, {"the model": expected}) for _ in range(4)]
        for loop in loops:
            stack.enter_context(loop)
        for number in range(KILLS):
            until(lambda: processes(server), 60, "a process")
            victim = choice.choice(processes(server))
            os.kill(victim, choice.choice(SIGNALS))
            until(lambda victim=victim: not alive(victim), 20, "its death")  # type: ignore[misc]
            until(lambda: code_of(server.target, "mlp", FEEDS) == "OK", 120, f"a response after death {number}")
            assert server.process.poll() is None, server.log
            seen |= set(processes(server))
        wait_replaced(server)
        server.wait_ready()
        until(lambda: "died 3 times within 10 minutes and stays off" in server.log, 60, "the shadow off")
        assert pids(server, SHADOW) == []
        seen |= set(processes(server))
    assert len(seen) > KILLS, "each was replaced"
    assert {pid for pid in seen if alive(pid)} == set(processes(server))
    assert server.log.count("has ended: killed by") == KILLS
    assert "has ended: killed by signal 40" in server.log
    assert "Traceback" not in server.log
    for loop in loops:
        assert loop.wrong == []
        assert set(loop.codes) <= {"OK", "UNAVAILABLE"}
    until(lambda: open_files(server) <= opened, 20, "no more open files than before")
    server.stop()
    assert not [pid for pid in seen if alive(pid)]
