"""Four connections that send calls as fast as they can, and clients beside them whose calls must not fail."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import figures
import grpc
import numpy as np
import pytest
from artifacts import write_counting
from attacked import Target
from figures import amount
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import infer_request
from offered import INFER
from rawgrpc import RawConnection, framed
from serverprocess import ServerProcess
from waiting import until

from bench.serving.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, RST_STREAM, frame, request_headers

pytestmark = pytest.mark.hostile
_CONNECTIONS, _AT_ONCE = 4, 500
_DECODED = 512 << 20  # bytes of metadata that gRPC may hold at once
_CHECK = "/grpc.health.v1.Health/Check"
_MESSAGE = infer_request("mlp", x=np.ones((1, 16), np.float32)).SerializeToString()
Frames = Callable[[int, int], bytes]  # of one call, by the port and the number of its stream


def complete_checks(port: int, stream: int) -> bytes:
    headers = frame(HEADERS, END_HEADERS, stream, request_headers(_CHECK, port))
    return headers + frame(DATA, END_STREAM, stream, framed(b""))


def resets(port: int, stream: int) -> bytes:
    headers = frame(HEADERS, END_HEADERS, stream, request_headers(INFER, port))
    return (
        headers + frame(DATA, END_STREAM, stream, framed(_MESSAGE)) + frame(RST_STREAM, 0, stream, bytes((0, 0, 0, 8)))
    )


def headers_alone(port: int, stream: int) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, request_headers(INFER, port))


def repeated_fields(port: int, stream: int) -> bytes:
    """One field of 120 bytes that goes into the table, and 4,000 references of one byte to it: 480 kB of metadata."""
    field = b"\x40" + bytes((1,)) + b"x" + bytes((119,)) + b"y" * 119
    return frame(HEADERS, END_HEADERS | END_STREAM, stream, request_headers(INFER, port) + field + b"\xbe" * 4000)


@contextlib.contextmanager
def flood(target: Target, frames: Frames) -> Iterator[list[int]]:
    """Send calls from four connections; yield how many each of their batches had."""
    stopped, sent = threading.Event(), list[int]()

    def attack() -> None:
        while not stopped.is_set():  # the server may close such a connection
            with contextlib.suppress(OSError), RawConnection(target.port) as attacker:
                for first in range(1, 1 << 30, 2 * _AT_ONCE):
                    if stopped.is_set():
                        return
                    attacker.send(b"".join(frames(target.port, first + 2 * n) for n in range(_AT_ONCE)))
                    sent.append(_AT_ONCE)

    threads = [threading.Thread(target=attack, daemon=True) for _ in range(_CONNECTIONS)]
    for thread in threads:
        thread.start()
    try:
        yield sent
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("frames", [complete_checks, headers_alone])
def test_floods_from_four_connections_fail_no_call_of_another_client(
    attack: Callable[..., Target], frames: Frames
) -> None:
    """Every call that is honest gets its response. gRPC ends calls at random, of any client, if too many wait."""
    target, honest = attack(), amount(100, 1000)
    with grpc.insecure_channel(target.address) as channel, target.stays_healthy():
        infer: Any = channel.unary_unary(INFER)
        health: Any = health_pb2_grpc.HealthStub(channel)
        with flood(target, frames) as sent:
            until(lambda: len(sent) > _CONNECTIONS, what="the flood")
            for _ in range(honest):
                assert infer(_MESSAGE, timeout=30)
                assert health.Check(health_pb2.HealthCheckRequest(), timeout=30).status == 1
    figures.record(how_much=f"{sum(sent):,} calls of an attacker, {2 * honest:,} honest ones")


def test_metadata_that_grows_when_decoded_takes_bounded_memory_and_fails_no_call_of_another_client(
    attack: Callable[..., Target],
) -> None:
    """gRPC decodes 480 kB from each 4 kB before it rejects the call. Others are slower while the flood lasts.

    How much of that memory the C library returns afterwards varies; a second flood must not need as much again. On a
    machine that has little time for the server, a request may arrive so late that the server takes its client for a
    slow one, and cancels the call: one in twenty at most.
    """
    target, honest = attack(), amount(20, 200)
    before = most = target.rss()
    calls, codes = 0, Counter[str]()
    for _ in range(2):
        with grpc.insecure_channel(target.address) as channel, flood(target, repeated_fields) as sent:
            infer: Any = channel.unary_unary(INFER)
            until(lambda sent=sent: len(sent) > _CONNECTIONS, what="the flood")  # type: ignore[misc]
            for _ in range(honest):
                codes[outcome(lambda infer=infer: infer(_MESSAGE, timeout=60))] += 1  # type: ignore[misc]
                most = max(most, target.rss())
        calls += sum(sent)
        with target.stays_healthy():
            pass
    figures.record(
        how_much=f"{calls:,} calls of an attacker, {2 * honest:,} honest ones", grown_mib=(most - before) >> 20
    )
    assert most - before < _DECODED
    assert codes["OK"] >= 0.95 * codes.total(), codes
    assert codes.keys() <= {"OK", "CANCELLED"}


def test_calls_reset_at_once_delay_others_and_stop_nothing(attack: Callable[..., Target]) -> None:
    """gRPC queues reset calls like others, and ends some of any client when the queue is full: repeating helps."""
    target, honest = attack(), amount(20, 200)
    codes = Counter[str]()
    with grpc.insecure_channel(target.address) as channel:
        infer: Any = channel.unary_unary(INFER)
        with target.stays_healthy(patience_s=30):  # health checks are ended like other calls, and repeated
            with flood(target, resets) as sent:
                until(lambda: len(sent) > _CONNECTIONS, what="the flood")
                while codes["OK"] < honest:
                    codes[outcome(lambda: infer(_MESSAGE, timeout=30))] += 1
            until(lambda: outcome(lambda: infer(_MESSAGE, timeout=30)) == "OK", what="an answer after the flood")
        until(lambda: target.process.of_model("requests_in_flight") == 0)
    figures.record(how_much=f"{sum(sent):,} calls of an attacker", **codes)
    assert codes.keys() <= {"OK", "CANCELLED"}


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code.name
    return "OK"


def test_a_request_whose_values_make_it_run_for_seconds_delays_no_other_client(tmp_path: Path) -> None:
    """Nothing runs on gRPC's only thread, however quick requests of this size were before."""
    write_counting(tmp_path / "counting" / "1")
    with ServerProcess("--repository", tmp_path) as server:
        target = Target(server.wait_ready())
        quick, slow = (infer_request("counting", x=np.full((1, 16), rounds, np.float32)) for rounds in (0, 1e6))
        with grpc.insecure_channel(target.address) as channel, target.stays_healthy() as monitor:
            infer: Any = channel.unary_unary(INFER)
            for _ in range(50):
                infer(quick.SerializeToString(), timeout=30)
            held = infer.future(slow.SerializeToString(), timeout=120)
            until(lambda: server.of_model("requests_in_flight", "counting") == 1)
            before = len(monitor.seconds)
            until(lambda: len(monitor.seconds) > before + 5 or held.done(), what="health checks meanwhile")
            assert not held.done()
            held.cancel()
