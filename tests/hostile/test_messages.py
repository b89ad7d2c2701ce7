"""Malformed messages: messages fuzzed with knowledge of the protocol, and bytes that are not messages at all."""

import contextlib
import multiprocessing
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import figures
import messages
import noise
import pytest
from attacked import GROWTH, HealthMonitor, Target
from attacked import PATIENCE_S as PATIENCE_OF_A_PROBE_S
from figures import SOAK, amount
from rawgrpc import RawConnection
from serverprocess import ServerProcess
from swelling import SWELLING, bomb, send_swelling
from volley import Oracle, Volley
from waiting import until

pytestmark = pytest.mark.hostile


RPCS = 23
CHECK = "/grpc.health.v1.Health/Check"
PATIENCE_S = 30.0  # until memory is freed: the server frees it when it is idle


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("messages")
    messages.write_models(root)
    return root


@pytest.fixture(scope="module")
def oracle(repository: Path) -> Oracle:
    return Oracle(repository)


@pytest.fixture(scope="module")
def target(repository: Path, oracle: Oracle) -> Iterator[Target]:
    said = ("its fp32 reference is being loaded", "live drift on", "the spread of drift is learned from")
    with ServerProcess("--repository", repository, env={"BF16KIT_SHARED_MEMORY": "nobody-has-such-a-file"}) as process:
        target = Target(process.wait_ready())
        Volley(target.address, oracle, first=10**9).fire(500)  # creates heaps and threads that are created once
        # Each is logged once for each model, too.
        until(lambda: all(process.log.count(each) == len(messages.MODELS) for each in said), 60, "live drift of all")
        yield target


@contextmanager
def unharmed(target: Target, oracle: Oracle) -> Iterator[HealthMonitor]:
    """Check that the server stays well during the block, and that afterwards its outputs are as before.

    Its memory must come back to what it was, and it must log nothing.
    """
    before, told = target.rss(), len(target.process.lines)
    with target.stays_healthy() as monitor:
        yield monitor
    after = Volley(target.address, oracle, first=10**9)
    after.fire(100)
    assert after.wrong == []
    assert target.process.lines[told:] == []
    until(lambda: target.rss() < before * GROWTH, PATIENCE_S, f"memory, {before >> 20} MiB before, back within 10 %")
    figures.record(after=f"{target.rss() >> 20}")


def test_fuzzed_messages_get_a_response_or_an_error_and_corrupt_no_output(target: Target, oracle: Oracle) -> None:
    """Every RPC of inference, health and reflection is fuzzed. ``tests/support/messages.py NUMBER`` shows a message."""
    volley = Volley(target.address, oracle)
    with unharmed(target, oracle):
        volley.fire(amount(4_000, 200_000))
        figures.record(
            how_much=f"{volley.messages:,} messages",
            valid_between=f"{volley.valid:,}, all bit for bit",
            slowest_call_ms=f"{volley.slowest * 1e3:.0f}",
            **{code.lower(): f"{count:,}" for code, count in volley.codes.most_common()},
        )
        assert volley.wrong == []
        assert len(volley.by_rpc) == RPCS


def _elsewhere(attack: Callable[[str, int, int], set[str]], *arguments: Any) -> set[str]:
    """Run the attack in a separate process, so that it does not delay the thread that checks the server's health."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(attack, *arguments).result()


def test_messages_that_expand_when_parsed_use_memory_in_proportion_to_their_size(
    target: Target, oracle: Oracle
) -> None:
    """Two bytes of an empty input are ninety in memory, and protobuf lets no other thread run while it parses."""
    together, nbytes = amount(2, 3), amount(8, 60) << 20
    before = target.rss()
    with unharmed(target, oracle) as monitor:
        codes = _elsewhere(send_swelling, target.address, together, nbytes)
    figures.record(how_much=f"{together * len(SWELLING)} messages of {nbytes >> 20} MiB, {together} at a time")
    assert codes == {"INVALID_ARGUMENT"}
    # The bound allows memory of one round that is still held when the next arrives; ninety times the bytes is far more.
    assert monitor.largest_rss - before < (128 << 20) + 6 * together * nbytes


def test_requests_that_expand_when_decompressed_delay_no_other_client(target: Target, oracle: Oracle) -> None:
    """They expand a thousandfold. If allowed to, gRPC decompresses on the one thread that all calls share."""
    count = amount(40, 500)
    if SOAK:
        _send_bombs(target, count)  # the first of so many calls create hundreds of threads, once
    before = target.rss()
    with unharmed(target, oracle) as monitor:
        size = _send_bombs(target, count)
    figures.record(how_much=f"{2 * count} requests of {size >> 10} KiB that are 60 MiB")
    assert monitor.largest_rss - before < 1 << 30


def _send_bombs(target: Target, count: int) -> int:
    """Send ``count`` requests to each of two RPCs; return the size of one in bytes, once all calls have ended."""
    size = 0
    for path in (messages.INFER, CHECK):
        data = bomb(path, target.port, 60 << 20)
        size = len(data)
        with ExitStack() as peers:
            senders = [peers.enter_context(RawConnection(target.port)) for _ in range(count)]
            for sender in senders:
                sender.send(data)
            # The server processes them one after the other, each in a fraction of a second.
            until(lambda senders=senders: all(sender.ended for sender in senders), max(120, count), "all answered")  # type: ignore[misc]
    return size


OPEN = 64  # earlier connections that stay open while another one sends


@pytest.mark.parametrize(("port", "make"), [(0, noise.grpc_bytes), (1, noise.http_bytes)], ids=["gRPC", "HTTP"])
def test_bytes_that_are_not_messages_do_no_harm(
    target: Target, oracle: Oracle, port: int, make: Callable[[int], bytes]
) -> None:
    """Each byte string has its own connection, which stays open for a while. ``number`` is the seed of its bytes."""
    answered, left = 0, deque[socket.socket]()
    where = ("127.0.0.1", target.process.ports()[port])
    with unharmed(target, oracle):
        for number in range(amount(3_000, 20_000)):
            peer = socket.create_connection(where, timeout=10)
            left.append(peer)
            with contextlib.suppress(OSError):  # the server may close the connection before the end
                peer.sendall(make(number))
            if len(left) > OPEN:
                answered += _hang_up(left.popleft())
            if number % 100 == 0:
                begun = time.monotonic()
                assert target.process.get("/livez")[0] == 200
                assert time.monotonic() - begun < PATIENCE_OF_A_PROBE_S, number
        answered += sum(map(_hang_up, left))
    figures.record(how_much=f"{number + 1:,} byte strings", answered_or_hung_up_on=f"{answered:,}")


def _hang_up(peer: socket.socket) -> bool:
    """Close the connection; return whether the server has sent anything, or closed it, by now."""
    with peer:
        peer.setblocking(False)
        try:
            peer.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True
