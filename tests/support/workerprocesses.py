"""Helpers for tests of a server with several processes: their process ids, and a connection to one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from serverprocess import ServerProcess

from bf16kit.protocol import inference_pb2 as pb
from service.transport.handlers import SERVICE


class Client:
    """A client with its own connection, which the kernel assigns to one of the workers."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])

    def ask(self, method: str) -> Any:
        """Return the callable of one RPC of the inference service."""
        rpc = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[method]
        return self.channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=GetMessageClass(rpc.input_type).SerializeToString,
            response_deserializer=GetMessageClass(rpc.output_type).FromString,
        )

    def call(self, method: str, message: Any, timeout: float = 30.0) -> Any:
        return self.ask(method)(message, timeout=timeout)


def pids(server: ServerProcess, module: str = "service.workers.worker") -> list[int]:
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
