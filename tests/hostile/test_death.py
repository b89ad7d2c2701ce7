"""A server is stopped or killed while 250 requests a second arrive over sixteen connections."""

import contextlib
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import figures
import numpy as np
import pytest
from artifacts import write_mlp
from figures import amount
from offered import Requests, wrong
from serverprocess import ServerProcess
from waiting import until

from bench.serving.http2 import CUT_OFF, NOT_PROCESSED, NOT_SENT
from bench.serving.openloop import Offering, Outcome

pytestmark = pytest.mark.hostile
_RATE = 250.0
# Requests wait for a fuller batch, so that some hundred accepted requests are always in flight.
_DELAY_SECONDS = 0.7
_SERVING = f"""\
max_queue_delay_ms: {_DELAY_SECONDS * 1e3:.0f}
max_batch_size: 4096
max_queue_size: 4096
max_queue_ms: 60000
"""
_ROOM = "max_in_flight: 4096\n"
_AT_THE_DOOR = "the server is shutting down; try another"
_BY_GRPC = ("CANCELLED", CUT_OFF)

Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts a server on its own ports, with its temporary files in ``tmp_path / "tmp"``."""
    write_mlp(tmp_path / "repository" / "mlp" / "1")
    (tmp_path / "server.yaml").write_text(_ROOM)
    (tmp_path / "tmp").mkdir()
    common = ("--repository", tmp_path / "repository", "--config", tmp_path / "server.yaml")
    with contextlib.ExitStack() as stack:

        def begin(*flags: str) -> ServerProcess:
            server = ServerProcess(*common, *flags, env={"TMPDIR": str(tmp_path / "tmp")})
            return stack.enter_context(server).wait_ready()

        yield begin


def counted(outcomes: list[Outcome]) -> dict[str, str]:
    total = Counter[str]()
    for outcome in outcomes:
        total.update(outcome.counts)
    return {word: f"{count:,}" for word, count in total.items()}


def let_in(server: ServerProcess) -> int:
    """Return a lower bound of the requests answered or in flight; one answered between the two readings is in neither.

    Return 0 until both counts are over 50.
    """
    answered, inside = server.of_model("requests_total", code="OK"), server.of_model("requests_in_flight")
    return int(answered + inside) if answered > 50 and inside > 50 else 0


def stop_under_load(
    server: ServerProcess, requests: Requests, expected: list[np.ndarray[Any, Any]], lame_duck: float
) -> tuple[Outcome, float]:
    """Send SIGTERM in the middle of the load; return how each call ended, and how long the server took to exit."""
    load = Offering(server.ports()[0], requests.messages, rate=_RATE, seconds=30)
    seen: list[int] = []

    def under_load() -> bool:
        seen.append(let_in(server))
        return seen[-1] > 0

    until(under_load, what="requests answered and at work")
    begun = time.monotonic()
    server.terminate()
    until(lambda: "draining for up to" in server.log, 10 + lame_duck, "the drain")
    draining = time.monotonic()
    code = server.exit_code()
    took = time.monotonic() - begun
    outcome = load.outcome()
    assert code == 0, server.log
    assert "Traceback" not in server.log
    assert draining - begun >= lame_duck
    assert wrong(outcome, expected) == 0
    assert len(outcome.answered) >= seen[-1]
    if lame_duck:
        assert [due for due, *_ in outcome.ended["OK"] if begun + lame_duck / 2 < due < draining], "a lame duck works"
    # The server rejected the other requests on arrival or never processed them: a client may retry on another server.
    # Calls that are on their way while gRPC tells clients to disconnect, long after the server has stopped accepting
    # requests, end with gRPC's own codes.
    assert outcome.counts.keys() <= {"OK", "UNAVAILABLE", *_BY_GRPC, NOT_PROCESSED, NOT_SENT}, outcome.said
    assert [due - draining for word in _BY_GRPC for due, *_ in outcome.ended.get(word, []) if due < draining] == []
    assert outcome.said.get("UNAVAILABLE", {}).keys() <= {_AT_THE_DOOR, "Cancelling all calls"}
    return outcome, took


def test_sigterm_under_load_loses_no_accepted_request(start: Start, tmp_path: Path) -> None:
    """Half of the rounds have a lame-duck period, in which the server answers everything."""
    (tmp_path / "repository" / "mlp" / "serving.yaml").write_text(_SERVING)
    requests, outcomes, times = Requests(), list[Outcome](), list[float]()
    expected = requests.computed(tmp_path / "repository" / "mlp" / "1")
    for turn in range(amount(2, 20)):
        lame_duck = turn % 2 * 0.6
        server = start("--lame-duck-seconds", str(lame_duck))
        outcome, took = stop_under_load(server, requests, expected, lame_duck)
        outcomes.append(outcome)
        times.append(took - lame_duck)
        server.close()
    figures.record(
        how_much=f"{len(outcomes)} rounds of {_RATE:g} calls/s",
        **counted(outcomes),
        slowest_end_s=f"{max(times):.2f}",
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def test_after_sigkill_under_load_a_new_server_starts_at_once_on_the_same_port(start: Start, tmp_path: Path) -> None:
    """It gives the same outputs, and the killed server leaves no files behind."""
    requests, outcomes, seconds = Requests(), list[Outcome](), list[float]()
    port = free_port()
    where = ("--grpc-port", str(port))
    begun = time.monotonic()
    server = start(*where)
    first = time.monotonic() - begun
    expected = requests.ask(server.target)
    files = sorted(tmp_path.rglob("*"))
    for _ in range(amount(2, 30)):
        load = Offering(port, requests.messages, rate=_RATE, seconds=30)
        until(lambda server=server: server.of_model("requests_total", code="OK") > 100)  # type: ignore[misc]
        server.process.send_signal(signal.SIGKILL)
        assert server.exit_code() == -signal.SIGKILL
        outcomes.append(load.outcome())
        assert wrong(outcomes[-1], expected) == 0
        assert outcomes[-1].counts.keys() <= {"OK", CUT_OFF, NOT_SENT}, outcomes[-1].said
        begun = time.monotonic()
        server = start(*where)
        seconds.append(time.monotonic() - begun)
        np.testing.assert_array_equal(requests.ask(server.target), expected)
        until(lambda: sorted(tmp_path.rglob("*")) == files, what="the files there were, and no others")
    server.terminate()
    assert server.exit_code() == 0
    figures.record(
        how_much=f"{len(outcomes)} rounds of {_RATE:g} calls/s",
        **counted(outcomes),
        slowest_restart_s=f"{max(seconds):.2f}",
        first_start_s=f"{first:.2f}",
    )
    assert min(seconds) < 2 * first + 1
