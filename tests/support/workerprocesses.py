"""Helpers for tests of a server with several processes: their process ids, and a connection to one of them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from loopback import infer_request, rpc
from serverprocess import ServerProcess
from waiting import until

from bf16kit.numerics.tensors import Array

SHADOW = "bf16kit.service.shadow.references"  # the module of the process with the fp32 references


class Client:
    """A client with its own connection, which the kernel assigns to one of the workers. A context manager."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.channel.close()

    def ask(self, method: str) -> Any:
        return rpc(self.channel, method)

    def call(self, method: str, message: Any, timeout: float = 30.0) -> Any:
        return self.ask(method)(message, timeout=timeout)

    def infer(self, model: str = "mlp", timeout: float = 30.0, **feeds: Array) -> bytes:
        """Return the bytes of the first output."""
        answer = self.call("ModelInfer", infer_request(model, **feeds), timeout)
        return bytes(answer.raw_output_contents[0])


@contextmanager
def several(server: ServerProcess, count: int = 15) -> Iterator[list[Client]]:
    """Yield so many connections that both of two workers have some: one of them had none once in 16,384 tests."""
    with ExitStack() as stack:
        yield [stack.enter_context(Client(server.target)) for _ in range(count)]


def pids(server: ServerProcess, module: str = "bf16kit.service.workers.worker") -> list[int]:
    """Return the ids of the server's current child processes that run ``module``."""
    of = server.process.pid
    children = Path(f"/proc/{of}/task/{of}/children").read_text().split()
    return [int(pid) for pid in children if module.encode() in _command(pid)]


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def alive(pid: int) -> bool:
    """Return whether this process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def listening(server: ServerProcess) -> int:
    """Return how many workers accept connections on the server's gRPC port."""
    port, tables = f":{server.ports()[0]:04X}", [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    sockets = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return sum(local.endswith(port) and state == "0A" for _, local, _, state, *_ in sockets)


def is_replaced(server: ServerProcess, *victims: int, workers: int = 2) -> bool:
    """Return whether none of the ``victims`` is left, and as many workers as before accept connections."""
    now = pids(server)
    return len(now) == workers == listening(server) and not {*victims} & {*now}


def wait_replaced(server: ServerProcess, *victims: int, workers: int = 2) -> None:
    until(lambda: is_replaced(server, *victims, workers=workers), 120, "another worker in place of the dead one")
