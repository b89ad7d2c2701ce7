"""Requests of mixed lengths, each of which needs memory of another size, do not make the server's memory grow.

In ``make soak`` the model is MiniLM, otherwise one whose memory grows as MiniLM's does and that computes little.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import figures
import grpc
import numpy as np
import pytest
from artifacts import write_attention
from attacked import Target
from figures import SOAK, amount
from loopback import infer_request
from offered import INFER
from serverprocess import ServerProcess
from waiting import until

from bench.core.workspace import Workspace

pytestmark = pytest.mark.hostile
_CLIENTS = 8
_VOCABULARY = 1000
_USUAL, _LONGEST, _LONG_SHARE = 64, 256, 0.01  # tokens, and the share of requests that may be longer than usual
# Rows and tokens of the large requests, and their number. They are sent once, one after the other: each runs on the
# next of the server's threads, with tensors that glibc allocates from a heap.
_LARGEST, _LARGE = (4, 384), 24
_GROWTH = 1.1
_TAKEN = 16 << 20  # bytes that a large request takes at least: its attention scores alone are 18 MiB
_KEPT = 64 << 20  # bytes that the heap may keep for as long as the server is busy
Feeds = Callable[[int, int], dict[str, np.ndarray[Any, Any]]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Target, str]]:
    root = tmp_path_factory.mktemp("memory")
    if SOAK:
        workspace = Workspace(root)
        repository, model = workspace.repository("repository", workspace.minilm()), "minilm"
    else:
        repository, model = root / "repository", "attention"
        write_attention(repository / model / "1")
    with ServerProcess("--repository", repository) as server:
        yield Target(server.wait_ready()), model


def request(model: str, rows: int, tokens: int, random: np.random.Generator) -> bytes:
    ids = random.integers(0, _VOCABULARY, (rows, tokens))
    if model == "attention":
        return infer_request(model, ids=ids).SerializeToString()
    ones = np.ones_like(ids)
    return infer_request(
        model, input_ids=ids, attention_mask=ones, token_type_ids=np.zeros_like(ids)
    ).SerializeToString()


def ask(target: Target, model: str, count: int, seed: int) -> None:
    """Send ``count`` requests of one client, most of them short, one in a hundred long."""
    random = np.random.default_rng(seed)
    with grpc.insecure_channel(target.address) as channel:
        call: Any = channel.unary_unary(INFER)
        for _ in range(count):
            longest = _LONGEST if random.random() < _LONG_SHARE else _USUAL
            tokens = int(np.exp(random.uniform(np.log(2), np.log(longest + 1))))
            call(request(model, 1, tokens, random), timeout=60)


def test_requests_of_mixed_lengths_do_not_make_memory_grow(served: tuple[Target, str]) -> None:
    """After the first tenth, memory is constant but for what a heap keeps of a few far larger requests."""
    target, model = served
    share = amount(2_000, 200_000) // 10 // _CLIENTS
    rss = list[int]()

    def tenth(number: int) -> None:
        with ThreadPoolExecutor(_CLIENTS) as clients:
            seeds = range(number * _CLIENTS, (number + 1) * _CLIENTS)
            for done in [clients.submit(ask, target, model, share, seed) for seed in seeds]:
                done.result()
        rss.append(target.rss())

    def largest() -> None:
        with grpc.insecure_channel(target.address) as channel:
            call: Any = channel.unary_unary(INFER)
            for seed in range(_LARGE):
                call(request(model, *_LARGEST, np.random.default_rng(seed)), timeout=120)

    tenth(0)
    with target.stays_healthy():
        target.process.forget_peak()
        largest()
        peak = target.process.status("VmHWM") << 10  # sampling RSS would miss memory that is held for milliseconds
        until(lambda: target.rss() <= _GROWTH * rss[0] + _KEPT, what="the memory of the large requests back")
        for number in range(1, 10):
            tenth(number)
    figures.record(
        how_much=f"{10 * _CLIENTS * share:,} requests to {model}",
        MiB_after_each_tenth=", ".join(f"{nbytes / 2**20:.0f}" for nbytes in rss),
    )
    assert peak > rss[0] + _TAKEN, "the large requests took nothing to speak of"
    assert max(rss[1:]) <= _GROWTH * rss[0] + _KEPT, [nbytes >> 20 for nbytes in rss]
    assert max(rss[5:]) <= _GROWTH * max(rss[1:5]), [nbytes >> 20 for nbytes in rss]
