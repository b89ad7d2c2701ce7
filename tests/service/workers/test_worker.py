"""A worker process, led by the test instead of a supervisor."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from waiting import stays, until

from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.peers.channel import text_file
from bf16kit.service.peers.child import Child
from bf16kit.service.peers.peer import Handler, Peer
from bf16kit.service.workers.fleet import WORKER

Start = Callable[..., Child]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that returns a worker, which :meth:`Child.maintain` starts; it gets a start with ``changes``."""
    children: list[Child] = []

    def made(handlers: Mapping[str, Handler] | None = None, **changes: object) -> Child:
        config = ServerConfig(repository=tmp_path, grpc_port=0, http_port=0).model_dump(mode="json")

        def begin(peer: Peer) -> None:
            with text_file("[]") as desired:
                peer.tell("start", {"config": config, "number": 1, "listen_when_loaded": False, **changes}, [desired])

        children.append(Child("the worker", WORKER, handlers or {}, begin, lambda: None))
        return children[-1]

    yield made
    for child in children:
        child.retire()
        child.kill()
        child.wait(20)


@pytest.mark.long
@pytest.mark.parametrize(
    ("damage", "error"),
    [
        ({"number": "x"}, "TypeError"),
        ({"config": {"repository": "/", "log_level": "info", "trace_rate": "often"}}, "ValidationError"),
    ],
)
def test_a_worker_whose_start_fails_ends_and_is_restarted_after_growing_pauses(
    start: Start,
    damage: dict[str, object],
    error: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Otherwise it would answer pings and serve nothing, for ever."""
    child = start(**damage)

    def ends() -> list[str]:
        child.maintain()
        return [each.partition("has ended: ")[2] for each in caplog.messages if "has ended" in each]

    until(lambda: len(ends()) == 2, 120, "two ends")
    assert ends() == ["exit code 2; restarting it in 0.25 s", "exit code 2; restarting it in 0.5 s"]
    log = capfd.readouterr().err
    assert log.count("this worker ends: an unexpected error") == 2
    assert error in log


@pytest.mark.long
def test_an_idle_worker_sends_nothing_unless_it_is_asked(start: Start) -> None:
    """Its counts, sent each second, would take a seventh of a processor with a hundred models, here and there."""
    told = list[str]()
    child = start({kind: lambda message, kind=kind: told.append(kind) for kind in ("report", "counts", "verdict")})

    def messages() -> int:
        child.maintain()  # which pings it
        return len(told)

    until(lambda: messages() >= 2, 60, "a report when it starts, and one when it listens")
    told.clear()
    stays(lambda: not messages(), 2.5, "silence")
    assert child.peer is not None
    assert child.peer.ask("counts").result(20)["metrics"]
