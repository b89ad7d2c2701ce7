"""The weights of a server with several workers: one copy in memory, which outlives the worker that created it."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
from artifacts import write_product
from loopback import infer_request
from serverprocess import Serve, ServerProcess
from waiting import until

from bf16kit.protocol import inference_pb2 as pb
from bf16kit.runtime.ort.kernel import LIBRARY
from service.grpc.handlers import SERVICE

pytestmark = pytest.mark.long  # starts servers of several processes again and again

KERNEL = pytest.mark.skipif(not LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
WIDTH = 512
X = np.linspace(-1, 1, WIDTH, dtype=np.float32).reshape(1, WIDTH)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_product(tmp_path / "models" / "product" / "1", width=WIDTH)
    return tmp_path / "models"


def answers(server: ServerProcess) -> set[bytes]:
    """Return the distinct outputs over so many connections that every worker has some."""
    found = set()
    for _ in range(15):
        with grpc.insecure_channel(server.target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            ask = channel.unary_unary(
                f"/{SERVICE}/ModelInfer",
                request_serializer=pb.ModelInferRequest.SerializeToString,
                response_deserializer=pb.ModelInferResponse.FromString,
            )
            found.add(ask(infer_request("product", x=X), timeout=30).raw_output_contents[0])
    return found


def workers(server: ServerProcess) -> dict[int, list[str]]:
    """Return the shared memory of weights that each worker maps: inode numbers by process id."""
    of = server.process.pid
    children = [int(pid) for pid in Path(f"/proc/{of}/task/{of}/children").read_text().split()]
    return {pid: _mapped(pid) for pid in children if b"service.workers.worker" in _command(pid)}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # the process has ended in the meantime
        return b""


def _mapped(pid: int) -> list[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sorted({line.split()[4] for line in lines if "memfd:bf16kit-weights" in line})


def _replaced(server: ServerProcess, killed: int, copy: list[str]) -> bool:
    found = workers(server)
    return killed not in found and list(found.values()) == [copy, copy]


@KERNEL
def test_all_workers_share_one_copy_of_the_weights_and_so_does_a_restarted_one(repository: Path, serve: Serve) -> None:
    server = serve("--repository", str(repository), "--workers", "2").wait_ready()
    (first, copy), (second, same) = workers(server).items()
    assert len(copy) == 1
    assert copy == same
    expected = answers(server)
    assert len(expected) == 1
    for killed in (first, second):  # including the worker that filled the memory
        os.kill(killed, signal.SIGKILL)
        until(partial(_replaced, server, killed, copy), 60, "another worker with the copy")
        server.wait_ready()
    assert answers(server) == expected


def test_workers_serve_without_the_kernel_too(repository: Path, serve: Serve) -> None:
    environment = {**os.environ, "BF16KIT_KERNEL_PATH": "off"}
    server = serve("--repository", str(repository), "--workers", "2", env=environment).wait_ready()
    assert len(answers(server)) == 1


def test_a_single_process_server_shares_no_memory(repository: Path, serve: Serve) -> None:
    server = serve("--repository", str(repository)).wait_ready()
    assert _mapped(server.process.pid) == []
