"""The client process of the latency and throughput benchmarks, and the handle a benchmark holds on it.

It sends the same serialised bytes again and again and never parses a reply. So blocks against two servers can take
turns while both clients stay connected and warm.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import grpc

from bench.core.child import Child, answer_all, module
from bench.serving import wire
from bench.serving.http2 import closed_loop


@dataclass(frozen=True, slots=True)
class Load:
    """Of one block of calls; ``client_cpu_s`` is what the client itself used, in seconds.

    ``p50`` and ``p99`` are of the calls' own seconds.
    """

    calls: int
    seconds: float
    client_cpu_s: float
    p50: float
    p99: float

    @property
    def rate(self) -> float:
        """Calls per second."""
        return self.calls / self.seconds


class Client(Child):
    """A client process for one server: start it with the serialised ``request``, leave it to end it."""

    def __init__(self, port: int, request: bytes) -> None:
        super().__init__(module("bench.serving.client", str(port)))
        self.send(request.hex())  # megabytes would not fit an argument

    def latency(self, calls: int) -> Load:
        """Of ``calls`` calls of grpcio's client, each made when the one before has been answered."""
        return Load(**self.ask({"calls": calls}))

    def load(self, in_flight: int, seconds: float, connections: int = 1) -> Load:
        """``in_flight`` calls kept open for ``seconds`` by :mod:`bench.serving.http2`.

        Several ``connections`` are for servers of several processes: each of them belongs to one.
        """
        return Load(**self.ask({"in_flight": in_flight, "seconds": seconds, "connections": connections}))


# --- inside the client process ----------------------------------------------------------------------------------------


def _main(port: int) -> None:
    request = bytes.fromhex(json.loads(sys.stdin.readline()))
    # Without serialisers it takes and gives bytes.
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.max_receive_message_length", -1)])
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(wire.INFER)

    def one_by_one(calls: int) -> list[float]:
        clock, took = time.perf_counter, []
        for _ in range(calls):
            started = clock()
            call(request)
            took.append(clock() - started)
        return took

    def act(asked: dict[str, Any]) -> dict[str, float]:
        cpu, started = _cpu_seconds(), time.perf_counter()
        took = one_by_one(**asked) if "calls" in asked else closed_loop(port, wire.INFER, request, **asked)
        seconds, used = time.perf_counter() - started, _cpu_seconds() - cpu
        took.sort()
        p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
        return {"calls": len(took), "seconds": seconds, "client_cpu_s": used, "p50": p50, "p99": p99}

    answer_all(act)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    _main(int(sys.argv[1]))
