"""The client process of the latency and throughput benchmarks, and the handle a benchmark holds on it.

It sends the same serialised bytes again and again and never parses a reply. The benchmark writes these bytes and then
one JSON command per line to its standard input, and reads one JSON answer per line. So blocks against two servers can
take turns while both clients stay connected and warm.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import grpc

from bench.serving import wire
from bench.serving.http2 import Connection, keep_open

Transport = Literal["http2", "grpcio"]


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one block of calls, one in flight, in seconds."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Load:
    """Of one block with several calls in flight; ``client_cpu_s`` is what the client itself used, in seconds.

    ``p50`` and ``p99`` of the calls' own seconds are NaN where they were not asked for.
    """

    calls: int
    seconds: float
    client_cpu_s: float
    p50: float = math.nan
    p99: float = math.nan

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

    def load(self, in_flight: int, seconds: float, transport: Transport, connections: int = 1) -> Load:
        """``in_flight`` calls kept open for ``seconds``, by :mod:`bench.serving.http2` or by grpcio's own client.

        Several ``connections`` are for servers of several processes: each of them belongs to one.
        """
        how = {"in_flight": in_flight, "seconds": seconds, "transport": transport, "connections": connections}
        return Load(**self._do("load", **how))

    def timed_load(self, in_flight: int, seconds: float) -> Load:
        """The same by :mod:`bench.serving.http2` on one connection, and how long the calls took."""
        return Load(**self._do("timed_load", in_flight=in_flight, seconds=seconds))

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
    """The two ways to call one server with one request."""

    def __init__(self, port: int, request: bytes) -> None:
        self._port = port
        self._request = request
        self._calls = [self._connect()]

    def _connect(self) -> grpc.UnaryUnaryMultiCallable[bytes, bytes]:
        """Without serialisers the call takes and gives bytes. Without a pool of its own it would share a connection."""
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.insecure_channel(f"127.0.0.1:{self._port}", options).unary_unary(wire.INFER)

    def latency(self, calls: int) -> dict[str, float]:
        call, request, clock = self._calls[0], self._request, time.perf_counter
        durations = []
        for _ in range(calls):
            started = clock()
            call(request)
            durations.append(clock() - started)
        durations.sort()
        return {"p50": durations[calls // 2], "p99": durations[calls * 99 // 100]}

    def load(self, in_flight: int, seconds: float, transport: Transport, connections: int) -> dict[str, float]:
        run = self._over_http2 if transport == "http2" else self._over_grpcio
        cpu, started = _cpu_seconds(), time.perf_counter()
        calls = run(in_flight, seconds, connections)
        elapsed = time.perf_counter() - started
        return {"calls": calls, "seconds": elapsed, "client_cpu_s": _cpu_seconds() - cpu}

    def timed_load(self, in_flight: int, seconds: float) -> dict[str, float]:
        took: list[float] = []
        connection = Connection(self._port, wire.INFER, self._request, len(self._calls[0](self._request)), took.append)
        cpu, started = _cpu_seconds(), time.perf_counter()
        try:
            calls = keep_open([connection], in_flight, seconds)
        finally:
            connection.close()
        elapsed = time.perf_counter() - started
        took.sort()
        shares = {"p50": took[calls // 2], "p99": took[calls * 99 // 100]}
        return {"calls": calls, "seconds": elapsed, "client_cpu_s": _cpu_seconds() - cpu, **shares}

    def _over_http2(self, in_flight: int, seconds: float, connections: int) -> int:
        expected = len(self._calls[0](self._request))
        opened = [Connection(self._port, wire.INFER, self._request, expected) for _ in range(connections)]
        try:
            return keep_open(opened, in_flight, seconds)
        finally:
            for connection in opened:
                connection.close()

    def _over_grpcio(self, in_flight: int, seconds: float, connections: int) -> int:
        """Futures: the callback of each sends the next. Cheaper than a thread per call, and no thread to wake."""
        while len(self._calls) < connections:
            self._calls.append(self._connect())
        deadline = time.perf_counter() + seconds
        finished, failures, completed = threading.Semaphore(0), list[str](), [0] * in_flight

        def send(index: int) -> None:
            call = self._calls[index % connections]
            call.future(self._request).add_done_callback(lambda call: received(index, call))

        def received(index: int, call: Any) -> None:
            completed[index] += 1
            if call.code() is not grpc.StatusCode.OK:
                failures.append(str(call.details()))
            if failures or time.perf_counter() >= deadline:
                finished.release()
            else:
                send(index)

        for index in range(in_flight):
            send(index)
        for _ in range(in_flight):
            finished.acquire()
        if failures:
            raise RuntimeError(f"a call failed: {failures[0]}")
        return sum(completed)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _main(port: int, request: bytes) -> None:
    caller = _Caller(port, request)
    commands: dict[str, Callable[..., dict[str, float]]] = {
        "latency": caller.latency,
        "load": caller.load,
        "timed_load": caller.timed_load,
    }
    for line in sys.stdin:
        command, arguments = json.loads(line)
        print(json.dumps(commands[command](**arguments)), flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]), bytes.fromhex(sys.stdin.readline()))
