"""The client process of the latency and throughput benchmarks, and the handle a benchmark holds on it.

It sends the same serialised bytes again and again and never parses a reply. The benchmark writes these bytes and then
one JSON command per line to its standard input, and reads one JSON answer per line. So blocks against two servers can
take turns while both clients stay connected and warm.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from bench.serving import wire
from bench.serving.http2 import Connection, keep_open


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one block of calls, one in flight, in seconds."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Load:
    """Of one block with several calls in flight; ``client_cpu_s`` is what the client itself used, in seconds.

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


class Client:
    """A client process for one server: start it with the serialised ``request``, leave it to end it."""

    def __init__(self, port: int, request: bytes) -> None:
        command = [sys.executable, "-m", "bench.serving.client", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        self._process.stdin.write(request.hex() + "\n")  # megabytes would not fit an argument
        self._process.stdin.flush()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()  # the end of its input ends it

    def latency(self, calls: int) -> Latency:
        """Percentiles over ``calls`` calls, each sent when the one before has been answered."""
        return Latency(**self._do("latency", calls=calls))

    def load(self, in_flight: int, seconds: float, connections: int = 1) -> Load:
        """``in_flight`` calls kept open for ``seconds`` by :mod:`bench.serving.http2`.

        Several ``connections`` are for servers of several processes: each of them belongs to one.
        """
        return Load(**self._do("load", in_flight=in_flight, seconds=seconds, connections=connections))

    def _do(self, command: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the client process ended with exit code {self._process.wait()}; its error is above")
        found: dict[str, Any] = json.loads(answer)
        return found


# --- inside the client process ----------------------------------------------------------------------------------------


class _Caller:
    """Calls one server with one request."""

    def __init__(self, port: int, request: bytes) -> None:
        self._port = port
        self._request = request
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.max_receive_message_length", -1)])
        # Without serialisers it takes and gives bytes.
        self._call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(wire.INFER)

    def latency(self, calls: int) -> dict[str, float]:
        call, request, clock = self._call, self._request, time.perf_counter
        durations = []
        for _ in range(calls):
            started = clock()
            call(request)
            durations.append(clock() - started)
        return _percentiles(durations)

    def load(self, in_flight: int, seconds: float, connections: int) -> dict[str, float]:
        took: list[float] = []
        expected = len(self._call(self._request))
        opened = [Connection(self._port, wire.INFER, self._request, expected, took.append) for _ in range(connections)]
        cpu, started = _cpu_seconds(), time.perf_counter()
        try:
            calls = keep_open(opened, in_flight, seconds)
        finally:
            for connection in opened:
                connection.close()
        elapsed = time.perf_counter() - started
        return {"calls": calls, "seconds": elapsed, "client_cpu_s": _cpu_seconds() - cpu, **_percentiles(took)}


def _percentiles(seconds: list[float]) -> dict[str, float]:
    seconds.sort()
    return {"p50": seconds[len(seconds) // 2], "p99": seconds[len(seconds) * 99 // 100]}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _main(port: int, request: bytes) -> None:
    caller = _Caller(port, request)
    commands: dict[str, Callable[..., dict[str, float]]] = {
        "latency": caller.latency,
        "load": caller.load,
    }
    for line in sys.stdin:
        command, arguments = json.loads(line)
        print(json.dumps(commands[command](**arguments)), flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]), bytes.fromhex(sys.stdin.readline()))
