"""``make demo``: convert all-MiniLM-L6-v2, serve it, ask it real sentences, and print what bf16 cost.

Everything runs as a user would run it: the two programs as processes, and a plain tritonclient that knows nothing of
bf16kit. Running it again converts again and replaces the artifact. Exit code 0 when every step worked.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, Self, TypeVar

import live_drift
import minilm
import numpy as np
import tritonclient.grpc as triton
from live_drift import LiveDrift
from numpy.typing import NDArray
from publish import MODEL, PublishFailed, program, publish
from sentences import sentences

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1] / "build" / "demo"
OUTPUT = "last_hidden_state"
LOG = REPOSITORY.parent / "demo-server.log"
MB = 1e6
SERVED_FILES = ("weights.bf16", "weights.fp32", "cpu.onnx")
T = TypeVar("T")

EVERYDAY = (
    "A man is eating a piece of bread.",
    "Someone is having a meal.",
    "The orchestra will play a symphony tonight.",
    "There is a concert in the city this evening.",
    "The invoice is due at the end of the month.",
    "Please pay the bill before the thirtieth.",
)


class DemoFailed(Exception):
    """A step did not do what it promises; the text says which, and where to look."""


def main() -> int:
    """Run the demo; 0 when all of it worked."""
    try:
        artifact = convert()
        with served() as (grpc_address, http_address), Client(grpc_address) as client:
            print_similarity(np.stack([client.embed(sentence) for sentence in EVERYDAY]))
            print_latency([_timed(client, sentence) for sentence in sentences(200)])
            print_drift(ask_until_measured(client, http_address))
        print_sizes(artifact)
    except (DemoFailed, PublishFailed, FileNotFoundError, triton.InferenceServerException) as failure:
        print(f"\ndemo failed: {failure}", file=sys.stderr)
        return 1
    print(
        "\ndemo done: `make serve` serves the same artifact on 127.0.0.1:8001 (gRPC) and :8002 (metrics, status page)"
    )
    return 0


# --- the two programs -------------------------------------------------------------------------------------------------


def convert() -> Path:
    """Convert the checkpoint into the demo's repository; the artifact's directory."""
    print(f"== converting all-MiniLM-L6-v2 (fp32) into {_shown(REPOSITORY)}", flush=True)
    return publish(REPOSITORY)


@contextmanager
def served() -> Iterator[tuple[str, str]]:
    """A server process on free ports: its gRPC and HTTP addresses once ready; asked to stop, and waited for, after."""
    grpc_port, http_port = _free_ports(2)
    print(f"\n== serving on 127.0.0.1:{grpc_port} (gRPC) and :{http_port} (HTTP); log: {_shown(LOG)}")
    command = [program("bf16-serve"), "--repository", str(REPOSITORY), "--device", "cpu"]
    command += ["--grpc-port", str(grpc_port), "--http-port", str(http_port)]
    started = time.perf_counter()
    with LOG.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        _wait("the server to be ready", lambda: _ready(server, http_port) or None, seconds=120)
        print(f"   ready after {time.perf_counter() - started:.1f} s")
        yield f"127.0.0.1:{grpc_port}", f"127.0.0.1:{http_port}"
        server.send_signal(signal.SIGTERM)
        if (code := server.wait(timeout=60)) != 0:
            raise DemoFailed(f"the server ended with exit code {code} on SIGTERM; see {_shown(LOG)}")
    except subprocess.TimeoutExpired:
        raise DemoFailed(f"the server did not end within a minute of SIGTERM; see {_shown(LOG)}") from None
    finally:
        server.kill()
        server.wait()


def _shown(path: Path) -> str:
    return os.path.relpath(path)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _ready(server: subprocess.Popen[bytes], http_port: int) -> bool:
    if server.poll() is not None:
        raise DemoFailed(f"the server ended with exit code {server.returncode}:\n{LOG.read_text()[-2000:]}")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/readyz", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def _wait(what: str, condition: Callable[[], T | None], seconds: float) -> T:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise DemoFailed(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.05)
    return value


# --- the client -------------------------------------------------------------------------------------------------------


class Client:
    """Sentence embeddings through plain tritonclient: what an application would write."""

    def __init__(self, address: str) -> None:
        self._server = triton.InferenceServerClient(address)
        self._inputs = [tensor.name for tensor in self._server.get_model_metadata(MODEL).inputs]
        self._tokenizer = minilm.tokenizer()

    def embed(self, sentence: str) -> NDArray[np.float64]:
        """The unit-length embedding [384] of a sentence."""
        feeds = minilm.tokenize(self._tokenizer, [sentence])
        reply = self._server.infer(MODEL, [_tensor(name, feeds[name]) for name in self._inputs])
        return np.asarray(minilm.mean_pool(reply.as_numpy(OUTPUT), feeds["attention_mask"])[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()


def _tensor(name: str, value: NDArray[np.int64]) -> Any:
    tensor = triton.InferInput(name, list(value.shape), "INT64")
    tensor.set_data_from_numpy(value)
    return tensor


def _timed(client: Client, sentence: str) -> float:
    started = time.perf_counter()
    client.embed(sentence)
    return time.perf_counter() - started


def ask_until_measured(client: Client, http_address: str, wanted: int = 100) -> LiveDrift:
    """The live drift once ``wanted`` requests were measured; asks for more sentences until then.

    The shadow never delays an answer: while the fp32 reference is loading or busy it drops samples, and counts them.
    """
    more = cycle(sentences(200))

    def measured() -> LiveDrift | None:
        client.embed(next(more))
        drift = live_drift.read(http_address)
        return drift if drift.outcomes.get("measured", 0) >= wanted else None

    return _wait(f"the shadow to measure {wanted} requests", measured, seconds=120)


# --- what came of it --------------------------------------------------------------------------------------------------


def print_similarity(embeddings: NDArray[np.float64]) -> None:
    """The cosine similarity of every pair; each sentence must be nearest to the one that means the same."""
    similarity = embeddings @ embeddings.T
    print("\n== similarity (cosine of mean-pooled embeddings, computed from bf16 weights)")
    for row, sentence in zip(similarity, EVERYDAY, strict=True):
        print(f"   {sentence:<46}" + "".join(f"{value:7.3f}" for value in row))
    nearest = (similarity - 2 * np.eye(len(EVERYDAY))).argmax(axis=1)
    if any(int(found) != index ^ 1 for index, found in enumerate(nearest)):
        raise DemoFailed(f"the nearest sentences are {nearest.tolist()}, not each other's paraphrase")


def print_latency(latencies: list[float]) -> None:
    """Percentiles over single-sentence requests, one in flight, as the client saw them."""
    p50, p99 = np.percentile(latencies, [50, 99]) * 1e3
    print(f"\n== latency of {len(latencies)} real sentences, one in flight, the fp32 shadow at work beside them")
    print(f"   p50 {p50:.1f} ms   p99 {p99:.1f} ms")


def print_drift(drift: LiveDrift) -> None:
    """Live drift beside what the converter measured; a demo whose drift is over budget has failed."""
    outcomes = ", ".join(f"{count:.0f} {outcome}" for outcome, count in drift.outcomes.items())
    print(f"\n== live drift from fp32, read from /metrics ({outcomes})")
    for row in drift.rows:
        measured = f"mean {row.mean:.2e}   at conversion {row.baseline:.2e}   {row.ratio:.2f} of budget"
        print(f"   {row.output:<20}{row.metric:<17}{measured}")
    if any(row.ratio > 1 for row in drift.rows):
        raise DemoFailed("live drift is over budget")


def print_sizes(artifact: Path) -> None:
    """Bytes on disk of each file, and of what is served, against the fp32 checkpoint."""
    source = (minilm.checkpoint() / "model.safetensors").stat().st_size
    files = {file.name: file.stat().st_size for file in sorted(artifact.iterdir())}
    print(f"\n== sizes (the fp32 checkpoint has {source / MB:.1f} MB)")
    for name, size in files.items():
        print(f"   {name:<24}{size / MB:9.2f} MB")
    served = sum(files.get(name, 0) for name in SERVED_FILES)
    print(f"   {served / source:.3f} of the checkpoint for one ONNX profile ({', '.join(SERVED_FILES)})")
    restorable = served + files.get("residual.bin", 0)
    print(f"   {restorable / source:.3f} with residual.bin, which restores the fp32 checkpoint bit for bit")


if __name__ == "__main__":
    sys.exit(main())
