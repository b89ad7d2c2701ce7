"""Tensors of 4 MB in shared memory against the same ones in the message: `bf16-serve` beside itself.

As perf_analyzer does it, the client writes its input once: what is compared is what it takes to hand tensors over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bench.core import models
from bench.core.processes import Server, bf16_serve
from bench.core.results import Measurement, Result
from bench.core.verdict import ratio
from bench.core.workspace import Workspace
from bench.peers import rates
from bench.peers.contenders import Contender
from bench.serving import wire
from bf16kit.protocol import inference_pb2 as pb

_AT_LEAST = 2.0
_IN_FLIGHT = (1, 4)
_SIDE = 1024  # of a float32 matrix: 4 MiB
_GRPC, _SHARED = "in the message", "in shared memory"
_REGISTER = f"/{wire.SERVICE}/SystemSharedMemoryRegister"


def write_model(file: Path) -> Path:
    """``x`` float32 ``[batch,1024,1024]`` times a row, to ``y`` of the same shape: 4 MiB in, 4 MiB out."""
    scale = np.random.default_rng(0).standard_normal(_SIDE, np.float32)
    node = helper.make_node("Mul", ["x", "scale"], ["y"], "scaling")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", _SIDE, _SIDE]) for name in "xy")
    graph = helper.make_graph([node], "scaling", [x], [y], [numpy_helper.from_array(scale, "scale")])
    return models.save(graph, file)


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Requests per second with shared memory over those without."""
    workspace.root.mkdir(parents=True, exist_ok=True)
    artifact = workspace.converted("scaling", write_model(workspace.root / "scaling.onnx"), "--profile", "cpu")
    repository = workspace.repository("peers_memory", artifact)
    x = np.random.default_rng(1).standard_normal((1, _SIDE, _SIDE), np.float32)
    servers = [
        Contender(_GRPC, "", lambda: bf16_serve(repository, workspace.root / "peers_memory.log")),
        Contender(_SHARED, "shared_memory: true", lambda: _with_region(workspace, repository, x)),
    ]
    effort = rates.QUICK if quick else rates.FULL
    requests = {_GRPC: wire.infer_request("scaling", {"x": x}), _SHARED: _shared_request(x.nbytes)}
    found = rates.measured(servers, requests, _IN_FLIGHT, effort, "grpcio")
    measurements = [
        Measurement.of(
            f"{number} in flight: {_SHARED} against {_GRPC}",
            ratio(of.seconds[_GRPC], of.seconds[_SHARED]),
            at_least=_AT_LEAST,
            detail="requests per second",
        )
        for number, of in found.items()
    ]
    settings = {"model": "4 MiB float32 in, 4 MiB out, an elementwise product between"}
    return rates.described("shared_memory", (_GRPC, _SHARED), rates.in_words(found), measurements, effort, settings)


@contextmanager
def _with_region(workspace: Workspace, repository: Path, x: NDArray[np.float32]) -> Iterator[Server]:
    """A server that knows the region ``bench``: ``x``, and as much room for what it is answered."""
    key = f"bf16kit-bench-{os.getpid()}"
    file = Path("/dev/shm", key)  # noqa: S108 - where POSIX shared memory is
    config = workspace.root / "peers_memory.yaml"
    config.write_text("shared_memory: true\n", "utf-8")
    try:
        file.write_bytes(x.tobytes() * 2)
        file.chmod(0o600)
        log = workspace.root / "peers_memory_shared.log"
        with bf16_serve(repository, log, "--config", str(config)) as server:
            region = pb.SystemSharedMemoryRegisterRequest(name="bench", key=f"/{key}", byte_size=2 * x.nbytes)
            with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                register: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_REGISTER)
                register(region.SerializeToString())
            yield server
    finally:
        file.unlink(missing_ok=True)


def _shared_request(nbytes: int) -> bytes:
    request = pb.ModelInferRequest(model_name="scaling")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=(1, _SIDE, _SIDE))
    for parameters, offset in ((tensor.parameters, 0), (request.outputs.add(name="y").parameters, nbytes)):
        parameters["shared_memory_region"].string_param = "bench"
        parameters["shared_memory_offset"].int64_param = offset
        parameters["shared_memory_byte_size"].int64_param = nbytes
    return request.SerializeToString()
