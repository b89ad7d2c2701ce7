"""Messages that no client means: fuzzed with knowledge of the protocol, and bytes that are no messages at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import figures
import grpc
import messages
import pytest
from attacked import Target, Wellness
from figures import amount
from serverprocess import ServerProcess
from swelling import SWELLING
from volley import Oracle, Volley
from waiting import until
from watched import GROWTH

from bf16kit.protocol import inference_pb2 as pb

pytestmark = pytest.mark.hostile


RPCS = 18
PATIENCE_S = 30.0  # in which memory comes back: it is given back when there is nothing to do


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
    process = ServerProcess("--repository", str(repository), "--grpc-port", "0", "--http-port", "0")
    try:
        target = Target(process.wait_ready())
        Volley(target.address, oracle, first=10**9).fire(500)  # heaps and threads, which are made once
        yield target
    finally:
        process.close()


@contextmanager
def unharmed(target: Target, oracle: Oracle) -> Iterator[Wellness]:
    """Well all the time; afterwards it answers as before, has nothing to tell, and its memory comes back."""
    before = target.rss()
    with target.stays_well() as wellness:
        yield wellness
    after = Volley(target.address, oracle, first=10**9)
    after.fire(100)
    assert after.wrong == []
    assert {"Traceback", "incident"}.isdisjoint(target.process.log.split()), target.process.log
    until(lambda: target.rss() < before * GROWTH, PATIENCE_S, f"memory, {before >> 20} MiB before, back within 10 %")
    figures.record(after=f"{target.rss() >> 20}")


def test_fuzzed_messages_are_answered_or_refused_and_spoil_no_answer(target: Target, oracle: Oracle) -> None:
    """On every RPC of inference, health and reflection. ``tests/support/messages.py NUMBER`` shows one of them."""
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


def test_messages_that_swell_take_no_more_than_they_have_bytes(target: Target, oracle: Oracle) -> None:
    """Two bytes of an empty input are ninety in memory, and protobuf lets no other thread run while it parses."""
    together, nbytes = amount(2, 6), amount(16, 60) << 20
    call: Any
    codes = set()
    with unharmed(target, oracle) as wellness, grpc.insecure_channel(target.address) as channel:
        before, call = target.rss(), channel.unary_unary(messages.INFER)
        for name, make in SWELLING.items():
            model = b"" if name.startswith("a name") else pb.ModelInferRequest(model_name="lookup").SerializeToString()
            data = model + make(nbytes)
            for future in [call.future(data, timeout=60) for _ in range(together)]:
                codes.add(future.code())
        figures.record(how_much=f"{together * len(SWELLING)} messages of {nbytes >> 20} MiB, {together} at a time")
        assert codes <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
        assert wellness.most - before < 6 * together * nbytes
