"""A bug in one part of the server ends neither the server nor the other parts. The tests put the bug there."""

import contextlib
import logging
import threading
from collections import Counter
from pathlib import Path

import pytest
from serverprocess import ServerProcess
from waiting import until

from bf16kit.service.config.loops import Ending, Stop
from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.drift.fallbackcontroller import FallbackController
from bf16kit.service.server import serve_single_process
from bf16kit.service.shadow.process import ShadowProcess
from bf16kit.service.workers.fleet import Fleet


@pytest.mark.parametrize("part", [FallbackController, ShadowProcess])
def test_the_periodic_work_is_done_at_intervals_and_an_error_in_it_does_not_end_the_server(
    part: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it a version that replaces one served in fp32 would not return to bf16 until it is sampled."""
    calls, ends = Counter[int](), list[Ending]()  # calls by instance: other tests may have left some behind

    def fails(self: object) -> None:
        calls[id(self)] += 1
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(part, "maintain", fails)
    stop, config = Stop(), ServerConfig(repository=tmp_path, grpc_port=0, http_port=0, drain_seconds=1)

    def serve() -> None:
        ends.append(serve_single_process(config, stop, lambda *ports: None))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        until(lambda: min(calls.values(), default=0) >= 5 or not thread.is_alive(), 60, "five calls")
        assert thread.is_alive()
    finally:
        stop.set()
        thread.join()
        stop.close()
    assert ends == [Ending(completed=True, threads_ended=True)]
    assert caplog.text.count("ZeroDivisionError: a bug") == len(calls)


@pytest.mark.long
def test_a_thread_that_does_not_end_does_not_keep_the_server_from_ending(tmp_path: Path) -> None:
    """gRPC's have been seen not to, after the process could start no more threads."""
    program = tmp_path / "program.py"
    program.write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "from bf16kit.service.cli import main\n"
        "main()\n"
    )
    ports = ("--grpc-port", "0", "--http-port", "0", "--model-control", "explicit")
    with contextlib.closing(ServerProcess("--repository", str(tmp_path), *ports, program=program)) as server:
        until(lambda: server.get("/readyz")[0] == 200, what="a server without models")
        server.terminate()
        assert server.exit_code() == 0


def test_an_error_with_one_worker_is_logged_and_the_others_are_kept_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Raised, it would end the server."""
    fleet, kept = Fleet(ServerConfig(repository=tmp_path, workers=2), 1, {}, lambda worker: None), list[str]()

    def fail() -> None:
        raise RuntimeError("a surprise")

    monkeypatch.setattr(fleet.workers[0], "maintain", fail)
    monkeypatch.setattr(fleet.workers[1], "maintain", lambda: kept.append("worker 2"))
    for _ in range(2):
        fleet.maintain()
    assert kept == ["worker 2"] * 2
    (logged,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert logged.getMessage() == "worker 1's maintenance failed; it will run again"
    assert logged.exc_info
