"""``python -m bench.serving.rest REPOSITORY``: a request over REST, in JSON and binary, beside gRPC.

The time until its response, and the server's processor time, which depends less on what else the machine does. One row
to each model of the repository, with 1 and 16 in flight, from one process; the sides take turns. A client only writes
bytes that are made before, and reads the response without parsing it: the times are mostly the server's.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np

from bench.core.processes import Server, bf16_serve
from bf16kit.numerics.tensors import BY_OIP
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.grpc.handlers import SERVICE

_TURNS, _SECONDS, _IN_FLIGHT = 5, 0.7, (1, 16)
_TOKENS = 16  # the size of free dimensions, other than the first
Call = Callable[[], object]


def main(repository: Path) -> None:
    """Print a line for each model, number in flight and side: both medians in ms, and how many times gRPC's."""
    with tempfile.TemporaryDirectory() as log, bf16_serve(repository, Path(log) / "log", "--http-inference") as server:
        for model in sorted(path.name for path in repository.iterdir() if path.is_dir()):
            for in_flight in _IN_FLIGHT:
                _compare(server, model, in_flight)


def _compare(server: Server, model: str, in_flight: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        describe: Any = channel.unary_unary(f"/{SERVICE}/ModelMetadata")
        asked = pb.ModelMetadataRequest(name=model).SerializeToString()
        arrays = _arrays(pb.ModelMetadataResponse.FromString(describe(asked)))
        raw = {name: array.tobytes() for name, (_, array) in arrays.items()}
        message = pb.ModelInferRequest(model_name=model, raw_input_contents=raw.values())
        for name, (datatype, array) in arrays.items():
            message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        infer: Any = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        data = message.SerializeToString()
        with (
            _http(server, model, in_flight, _json(arrays)) as text,
            _http(server, model, in_flight, _binary(arrays)) as binary,
        ):
            sides: dict[str, list[Call]] = {"gRPC": [lambda: infer(data)] * in_flight, "binary": binary, "JSON": text}
            found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
            for turn in range(_TURNS + 1):
                for side, calls in sides.items():
                    found[side] += [_measure(server, calls)] * (turn > 0)  # the first warms up
    for side, turns in found.items():
        line = f"{model:8} {in_flight:3} in flight  {side:6}"
        for at, what in enumerate(("time", "processor")):
            ratio = median(ours[at] / base[at] for ours, base in zip(turns, found["gRPC"], strict=True))
            line += f"  {what} {1e3 * median(turn[at] for turn in turns):7.3f} ms, x {ratio:.2f}"
        print(line)


def _arrays(told: pb.ModelMetadataResponse) -> dict[str, tuple[str, Any]]:
    """One row for each input: ones for integers, which are valid ids and masks."""
    rng, found = np.random.default_rng(0), {}
    for tensor in told.inputs:
        shape = [1, *(size if size > 0 else _TOKENS for size in tensor.shape[1:])]
        dtype = BY_OIP[tensor.datatype].numpy
        values = np.ones(shape, dtype) if dtype.kind in "iu" else rng.standard_normal(shape).astype(dtype)
        found[tensor.name] = tensor.datatype, values
    return found


def _json(arrays: Mapping[str, tuple[str, Any]]) -> bytes:
    inputs = [
        {"name": name, "datatype": datatype, "shape": array.shape, "data": array.ravel().tolist()}
        for name, (datatype, array) in arrays.items()
    ]
    body = json.dumps({"inputs": inputs}).encode()
    return f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def _binary(arrays: Mapping[str, tuple[str, Any]]) -> bytes:
    inputs = [
        {"name": name, "datatype": datatype, "shape": array.shape, "parameters": {"binary_data_size": array.nbytes}}
        for name, (datatype, array) in arrays.items()
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    body = b"".join((head, *(array.tobytes() for _, array in arrays.values())))
    return f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def _http(server: Server, model: str, connections: int, rest: bytes) -> Iterator[list[Call]]:
    """Yield a function for each connection, which sends the request and waits for the response."""
    request = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\n".encode() + rest
    peers = [socket.create_connection(("127.0.0.1", server.http_port)) for _ in range(connections)]

    def call(peer: socket.socket) -> None:
        peer.sendall(request)
        received = b""
        while b"\r\n\r\n" not in received:
            received += peer.recv(1 << 16)
        head, _, body = received.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(received.decode())
        missing = int(head.lower().partition(b"\ncontent-length: ")[2].split(b"\r")[0]) - len(body)
        while missing > 0:
            missing -= len(peer.recv(1 << 16))

    try:
        yield [lambda peer=peer: call(peer) for peer in peers]  # type: ignore[misc]
    finally:
        for peer in peers:
            peer.close()


def _measure(server: Server, calls: list[Call]) -> tuple[float, float]:
    """Call all of them at once, each again and again. Return a request's mean time, and processor time, in seconds."""
    until = time.monotonic() + _SECONDS

    def loop(call: Call) -> list[float]:
        found = []
        while (begun := time.monotonic()) < until:
            call()
            found.append(time.monotonic() - begun)
        return found

    busy = server.own_cpu_seconds()
    with ThreadPoolExecutor(len(calls)) as threads:
        times = [each for found in threads.map(loop, calls) for each in found]
    return sum(times) / len(times), (server.own_cpu_seconds() - busy) / len(times)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
