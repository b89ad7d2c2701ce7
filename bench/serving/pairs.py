"""Latency of two servers side by side: their blocks of calls take turns, and which goes first alternates.

So what else the machine does falls on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from bench.core.processes import Server
from bench.core.results import Measurement
from bench.serving.client import Client, Latency

_WARM_UP_CALLS = 500
_US = 1e6


@dataclass(frozen=True, slots=True)
class Effort:
    """``rounds`` of fresh processes, in each of them ``blocks`` of ``calls`` for either server."""

    rounds: int
    blocks: int
    calls: int

    def settings(self) -> dict[str, int]:
        return {"rounds": self.rounds, "blocks_per_round": self.blocks, "calls_per_block": self.calls}


Pair = tuple[Latency, Latency]  # of one block of either server


def take_turns(servers: tuple[Server, Server], request: bytes, effort: Effort) -> list[Pair]:
    """One round: pairs of blocks, one call in flight."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(Client(server.port, request)) for server in servers)
        for client in (first, second):
            client.latency(_WARM_UP_CALLS)
        return [_pair(first, second, effort.calls, in_order=block % 2 == 0) for block in range(effort.blocks)]


def compared(pairs: Sequence[Pair], names: tuple[str, str], *, at_most: float | None = None) -> list[Measurement]:
    """The first server's p50 divided by the second's, and what that is made of."""
    ratios = [first.p50 / second.p50 for first, second in pairs]
    sides = dict(zip(names, zip(*pairs, strict=True), strict=True))
    p50, p99 = (
        {name: median(getattr(block, percentile) for block in blocks) for name, blocks in sides.items()}
        for percentile in ("p50", "p99")
    )
    return [
        Measurement(f"p50 ratio to {names[1]}", p50[names[0]] / p50[names[1]], at_most=at_most),
        Measurement("median of the paired ratios", median(ratios)),
        Measurement("smallest paired ratio", min(ratios)),
        Measurement("largest paired ratio", max(ratios)),
        *(Measurement(f"{name} p50", seconds * _US, "µs") for name, seconds in p50.items()),
        *(Measurement(f"{name} p99", seconds * _US, "µs") for name, seconds in p99.items()),
    ]


def _pair(first: Client, second: Client, calls: int, *, in_order: bool) -> Pair:
    if in_order:
        return first.latency(calls), second.latency(calls)
    later = second.latency(calls)
    return first.latency(calls), later
