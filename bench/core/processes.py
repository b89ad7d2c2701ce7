"""The processes a benchmark talks to: `bf16-serve` and the bare handler, each stopped when its block ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from bench.core.child import Child, module
from bench.core.workspace import program
from bench.serving import wire
from bf16kit.protocol import inference_pb2 as pb

_READY_TIMEOUT_S = 60.0
_POLL_S = 0.005
_DRIFT_SAMPLES = re.compile(r'^bf16kit_drift_samples_total\{.*model="(\w+)",outcome="(\w+)".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Server:
    """A process that answers gRPC on ``port`` of the loopback interface; ``started_s`` is how long that took.

    ``http_port`` has its metrics, where it is one of ours.
    """

    pid: int
    port: int
    started_s: float
    http_port: int = 0

    def cpu_seconds(self) -> float:
        """User and system time that the process and those it has started have used so far."""
        return sum(map(_ticks, _process_tree(self.pid))) / os.sysconf("SC_CLK_TCK")

    def own_cpu_seconds(self) -> float:
        """The same of the process alone, without those it has started, to the nanosecond."""
        clock = (~self.pid << 3) | 2  # Linux' name for a process' CPU clock: MAKE_PROCESS_CPUCLOCK(pid, SCHED)
        return time.clock_gettime(clock)


def _stat(pid: int) -> list[str]:
    """The fields after the name: state, parent, … Nothing where the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _ticks(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _process_tree(pid: int) -> list[int]:
    """``pid``, its children, and theirs."""
    parents = {int(entry.name): _stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    family = [pid]
    for member in family:
        family += [child for child, fields in parents.items() if fields and int(fields[1]) == member]
    return family


def proportional_bytes(server: Server) -> int:
    """The memory of the process and of those it has started, what they share counted once (PSS)."""
    return sum(_proportional(pid) for pid in _process_tree(server.pid))


def _proportional(pid: int) -> int:
    """0 where the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def drift_samples(server: Server) -> dict[tuple[str, str], float]:
    """Rows by model and outcome, as the metrics of one of our servers have them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return {(model, outcome): float(value) for model, outcome, value in _DRIFT_SAMPLES.findall(text)}


@contextmanager
def bf16_serve(repository: Path, log: Path, *flags: str) -> Iterator[Server]:
    """`bf16-serve` on ``repository``, ready; its log goes to ``log`` and is shown when it does not get there."""
    port, http_port = _free_ports(2)
    command = [program("bf16-serve"), "--repository", str(repository), "--device", "cpu", *flags]
    command += ["--grpc-port", str(port), "--http-port", str(http_port)]
    with _running(command, port, log, os.environ) as server:
        yield replace(server, http_port=http_port)


@contextmanager
def peer_server(
    command: Callable[[list[int]], list[str]], log: Path, environment: Mapping[str, str], model: str
) -> Iterator[Server]:
    """Another server of the protocol, ``model`` ready. ``command`` is given ports for gRPC, HTTP and metrics."""
    ports = _free_ports(3)
    # MLServer leaves a directory of metrics where it is started.
    with _running(command(ports), ports[0], log, environment, model, directory=log.parent) as server:
        yield server


@contextmanager
def _running(
    command: list[str],
    port: int,
    log: Path,
    environment: Mapping[str, str],
    model: str = "",
    directory: Path | None = None,
) -> Iterator[Server]:
    with log.open("w") as stream:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, text=True, env=dict(environment), cwd=directory
        )
    try:
        _wait_until_ready(process, port, log, model)
        yield Server(process.pid, port, time.perf_counter() - started)
    finally:
        _stop(process)


@contextmanager
def bare_handler(graph: Path) -> Iterator[Server]:
    """The bare handler of :mod:`bench.serving.bare` around ``graph``."""
    started = time.perf_counter()
    with Child(module("bench.serving.bare", str(graph))) as child:
        yield Server(child.pid, child.ask("port"), time.perf_counter() - started)


def _free_ports(count: int) -> list[int]:
    """Ports free just now. Held together, so that they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def _wait_until_ready(process: subprocess.Popen[str], port: int, log: Path, model: str = "") -> None:
    """``model``: it is to be ready as well, which a server may say before it is."""
    deadline = time.monotonic() + _READY_TIMEOUT_S
    # A channel waits ever longer between attempts to connect; a start is timed more finely than that.
    options = [("grpc.initial_reconnect_backoff_ms", 20), ("grpc.max_reconnect_backoff_ms", 20)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        ready_call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            wire.MODEL_READY if model else wire.SERVER_READY
        )
        request = pb.ModelReadyRequest(name=model).SerializeToString() if model else b""
        while not _is_ready(ready_call, request):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not become ready:\n{log.read_text()[-4000:]}")
            time.sleep(_POLL_S)


def _is_ready(ready_call: grpc.UnaryUnaryMultiCallable[bytes, bytes], request: bytes) -> bool:
    try:
        return pb.ModelReadyResponse.FromString(ready_call(request, timeout=1)).ready  # the server's is alike
    except grpc.RpcError:
        return False


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
