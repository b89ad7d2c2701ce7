"""Runs the server for the demo: a process on free ports, stopped when the demo is done with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from publish import program_path

LOGS = Path(__file__).parents[2] / "build"
PATIENCE_SECONDS = 300.0  # a machine with other work may take minutes for a step that takes seconds
ANSWER_SECONDS = 5.0
T = TypeVar("T")


class DemoFailed(Exception):
    """A step of the demo failed; the text says which, and where to look."""


@contextmanager
def running_server(repository: Path) -> Iterator[tuple[str, str]]:
    """Start a server on free ports; yield its gRPC and HTTP addresses once ready; then stop it and wait for its end."""
    log = LOGS / f"{repository.name}-server.log"
    grpc_port, http_port = _free_ports(2)
    print(f"== serving on 127.0.0.1:{grpc_port} (gRPC) and :{http_port} (HTTP); log: {display_path(log)}")
    command = [program_path("bf16-serve"), "--repository", str(repository), "--device", "cpu"]
    command += ["--grpc-port", str(grpc_port), "--http-port", str(http_port)]
    started = time.perf_counter()
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait("the server to be ready", lambda: is_ready(server, http_port, log) or None)
        print(f"   ready after {time.perf_counter() - started:.1f} s")
        yield f"127.0.0.1:{grpc_port}", f"127.0.0.1:{http_port}"
        server.send_signal(signal.SIGTERM)
        if (code := server.wait(timeout=PATIENCE_SECONDS)) != 0:
            raise DemoFailed(f"the server ended with exit code {code} on SIGTERM; see {display_path(log)}")
    except subprocess.TimeoutExpired:
        raise DemoFailed(
            f"the server did not end within {PATIENCE_SECONDS:.0f} s of SIGTERM; see {display_path(log)}"
        ) from None
    finally:
        server.kill()
        server.wait()


def display_path(path: Path) -> str:
    """Return ``path`` relative to the working directory."""
    return os.path.relpath(path)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def is_ready(server: subprocess.Popen[bytes], http_port: int, log: Path) -> bool:
    """Return whether the server is ready; raise :class:`DemoFailed` with its log if it has ended."""
    if server.poll() is not None:
        raise DemoFailed(f"the server ended with exit code {server.returncode}:\n{log.read_text()[-2000:]}")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/readyz", timeout=ANSWER_SECONDS) as reply:
            return bool(reply.status == 200)
    except OSError:  # nobody listens yet, it is not ready, or a busy machine does not come to answer
        return False


def wait(
    what: str, condition: Callable[[], T | None], progress: Callable[[], str] = str, patience: float = PATIENCE_SECONDS
) -> T:
    """Return the first true value of ``condition``.

    Waits as long as ``progress``, which says how far it is, changes. Raises DemoFailed once it has not changed for
    ``patience`` seconds.
    """
    last, since = "", time.monotonic()
    while not (value := condition()):
        if (now := progress()) != last:
            last, since = now, time.monotonic()
        if time.monotonic() - since > patience:
            raise DemoFailed(
                f"waited for {what}; nothing has changed for {patience:.0f} s" + (f": {last}" if last else "")
            )
        time.sleep(0.05)
    return value
