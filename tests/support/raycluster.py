"""Calls of tests/ray to an application on a Ray cluster, without importing Ray."""

import json
import re
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
from google.protobuf.message_factory import GetMessageClass
from loopback import infer_request

from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.grpc.handlers import SERVICE

NODE = {"num_cpus": 2, "memory": 6 << 30, "object_store_memory": 80 << 20}
# Seconds that a test waits for Ray; only a failure takes so long. Ray tries three times to start a replica that cannot
# load its model. One start takes 5 s on an idle machine, and a minute if CI's other steps share the cores.
PATIENCE = 600.0
_RETRY_SECONDS = 60.0
METHODS = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(1, 16)


def request(model: str = "mlp", **fields: Any) -> bytes:
    message = infer_request(model, x=X)
    for name, value in fields.items():
        setattr(message, name, value)
    return message.SerializeToString()


def call_rpc(
    channel: grpc.Channel, method: str, data: bytes, timeout: float = 60.0, **more: Any
) -> tuple[Any, bytes | str]:
    """Call an RPC. Return OK and the response's bytes, or the error's code and details."""
    path = method if "/" in method else f"/{SERVICE}/{method}"
    call: Any = channel.unary_unary(path)
    try:
        return grpc.StatusCode.OK, call(data, timeout=timeout, **more)
    except grpc.RpcError as error:
        return error.code(), error.details() or ""


def free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


def empty(method: str) -> bytes:
    rpc = next(each for each in METHODS if each.name == method)
    found: bytes = GetMessageClass(rpc.input_type)().SerializeToString()
    return found


def replicas(model: str, raylet: int | None = None) -> list[int]:
    """Return the processes that serve ``model``. ``raylet``, a node's process, restricts them to its children."""
    return _processes(f"ServeReplica:bf16kit.{model}:", raylet)


def fronts(raylet: int) -> list[int]:
    """Return the processes of fronts on the node of ``raylet``."""
    return _processes("ServeReplica:bf16kit:Front", raylet)


def _processes(title: str, raylet: int | None) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and title in (entry / "cmdline").read_text():
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                found += [int(entry.name)] if raylet in (None, parent) else []
        except OSError:
            continue
    return found


def of_node(node: Any) -> int:
    """Return the raylet process of ``node``, a node of :class:`ray.cluster_utils.Cluster`."""
    pid: int = node.all_processes["raylet"][0].process.pid
    return pid


@dataclass
class Served:
    """The applications, and the addresses at which they serve."""

    channel: grpc.Channel
    address: str
    http: str
    deployed: Any
    cluster: Any

    def ask(self, method: str, data: bytes, timeout: float = 60.0, **more: Any) -> tuple[Any, bytes | str]:
        return call_rpc(self.channel, method, data, timeout, **more)

    def infer(self, model: str = "mlp", timeout: float = 60.0, **fields: Any) -> tuple[Any, bytes | str]:
        return self.ask("ModelInfer", request(model, **fields), timeout)

    def get(self, url: str) -> str:
        with urllib.request.urlopen(url, timeout=20) as answer:
            found: str = answer.read().decode()
        return found

    def targets(self) -> list[str]:
        found: list[str] = json.loads(self.get(f"{self.http}/targets"))[0]["targets"]
        return found

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum over all replicas of the series with these labels."""
        total = 0.0
        for target in self.targets():
            try:
                page = self.get(f"http://{target}/metrics")
            except OSError:  # it has just ended, and stays a target until the front's next look
                continue
            for line in page.splitlines():
                found = re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line)
                if found and all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
                    total += float(found[2])
        return total

    def states(self) -> dict[str, str]:
        return {name: state.status for name, state in self.deployed.states().items()}

    def all_running(self) -> bool:
        return set(self.states().values()) == {"RUNNING"}


class RepeatedCalls:
    """Makes calls on a few threads while the block runs. A call that fails is sent again, for a minute in all."""

    def __init__(self, send: Callable[[], tuple[Any, bytes | str]], threads: int = 3) -> None:
        self.codes: Counter[str] = Counter()
        self.errors: list[str] = []
        self.answers: list[bytes] = []
        self.unanswered = 0
        self._send = send
        self._stop = threading.Event()
        self._running = [threading.Thread(target=self._run) for _ in range(threads)]

    def __enter__(self) -> Self:
        for thread in self._running:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._running:
            thread.join()

    @property
    def calls(self) -> int:
        return self.codes.total()

    def _run(self) -> None:
        while not self._stop.is_set():
            until = time.monotonic() + _RETRY_SECONDS
            while time.monotonic() < until:
                code, answer = self._send()
                self.codes[code.name] += 1
                if code is grpc.StatusCode.OK:
                    assert isinstance(answer, bytes)
                    self.answers.append(answer)
                    break
                self.errors.append(f"{code.name}: {answer!r}")
                time.sleep(0.05)
            else:
                self.unanswered += 1
            time.sleep(0.005)
