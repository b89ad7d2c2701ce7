"""The server as one process."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
from waiting import until

from service.config.serverconfig import ServerConfig
from service.config.stop import Ending, Stop
from service.drift.fallbackcontroller import FallbackController
from service.server import serve_single_process
from service.shadow.process import ShadowProcess


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
