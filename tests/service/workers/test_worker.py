"""A worker process, led by the test instead of a supervisor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import stays, until

from service.config.serverconfig import ServerConfig
from service.peers.channel import text_file
from service.peers.child import Child
from service.peers.peer import Peer
from service.workers.fleet import WORKER


def start_of(tmp_path: Path) -> dict[str, object]:
    config = ServerConfig(repository=tmp_path, grpc_port=0, http_port=0).model_dump(mode="json")
    return {"config": config, "number": 1, "listen_when_loaded": False}


def damaged(field: str, value: object) -> Callable[[dict[str, object]], dict[str, object]]:
    return lambda start: {**start, field: value}


@pytest.mark.long
@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (damaged("number", "x"), "TypeError"),
        (damaged("config", {"repository": "/", "log_level": "info", "trace_rate": "often"}), "ValidationError"),
    ],
)
def test_a_worker_whose_start_fails_ends_and_is_restarted_after_growing_pauses(
    damage: Callable[[dict[str, object]], dict[str, object]],
    error: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Otherwise it would answer pings and serve nothing, for ever."""

    def begin(peer: Peer) -> None:
        with text_file("[]") as desired:
            peer.tell("start", damage(start_of(tmp_path)), [desired])

    child = Child("the worker", WORKER, {}, begin, lambda: None)
    try:

        def ended() -> int:
            child.maintain()
            return sum("has ended" in each for each in caplog.messages)

        until(lambda: ended() == 2, 120, "two ends")
    finally:
        child.retire()
        child.kill()
        child.wait(20)
    ends = [each for each in caplog.messages if "has ended" in each]
    assert [each.partition("has ended: ")[2] for each in ends] == [
        "exit code 2; restarting it in 0.25 s",
        "exit code 2; restarting it in 0.5 s",
    ]
    log = capfd.readouterr().err
    assert log.count("this worker ends: an unexpected error") == 2
    assert f"{error}" in log


@pytest.mark.long
def test_an_idle_worker_sends_nothing_unless_it_is_asked(tmp_path: Path) -> None:
    """Its counts, sent each second, would take a seventh of a processor with a hundred models, here and there."""
    told = list[str]()

    def begin(peer: Peer) -> None:
        with text_file("[]") as desired:
            peer.tell("start", start_of(tmp_path), [desired])

    handlers = {kind: lambda message, kind=kind: told.append(kind) for kind in ("report", "counts", "verdict")}
    child = Child("the worker", WORKER, handlers, begin, lambda: None)
    try:

        def listens() -> bool:
            child.maintain()
            return len(told) >= 2  # a report when it starts, and one when it listens

        until(listens, 60, "its reports")
        told.clear()

        def says_nothing() -> bool:
            child.maintain()  # which pings it
            return not told

        stays(says_nothing, 2.5, "silence")
        assert child.peer is not None
        assert child.peer.ask("counts").result(20)["metrics"]
    finally:
        child.retire()
        child.kill()
        child.wait(20)
