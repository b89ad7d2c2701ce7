"""``make demo``: convert all-MiniLM-L6-v2, serve it, embed real sentences, and print the cost of bf16.

At the end it serves a copy that was damaged on purpose, and shows how the server detects that and what it does.

Everything runs as a user would run it: the two programs as processes, and a plain tritonclient without bf16kit. A
second run converts again and replaces the artifact. Exit code 0 when every step worked.
"""

from __future__ import annotations

import sys
import time
from itertools import cycle
from pathlib import Path

import breach
import live_drift
import minilm
import numpy as np
import tritonclient.grpc as triton
from client import Client
from live_drift import LiveDrift
from numpy.typing import NDArray
from publish import PublishFailed, publish
from running import DemoFailed, display_path, running_server, wait
from sentences import sentences

REPOSITORY = Path(__file__).parents[2] / "build" / "demo"
MB = 1e6
SERVED_FILES = ("weights.bf16", "weights.fp32", "cpu.onnx")

EVERYDAY = (
    "A man is eating a piece of bread.",
    "Someone is having a meal.",
    "The orchestra will play a symphony tonight.",
    "There is a concert in the city this evening.",
    "The invoice is due at the end of the month.",
    "Please pay the bill before the thirtieth.",
)


def main() -> int:
    """Run the demo; 0 when all of it worked."""
    try:
        artifact = convert()
        with running_server(REPOSITORY) as (grpc_address, http_address), Client(grpc_address) as client:
            print_similarity(np.stack([client.embed(sentence) for sentence in EVERYDAY]))
            print_latency([_timed(client, sentence) for sentence in sentences(200)])
            print_drift(wait_until_measured(client, http_address))
        print_sizes(artifact)
        breach.show(artifact, REPOSITORY.with_name("demo-damaged"))
    except (DemoFailed, PublishFailed, FileNotFoundError, triton.InferenceServerException) as failure:
        print(f"\ndemo failed: {failure}", file=sys.stderr)
        return 1
    print(
        "\ndemo done: `make serve` serves the same artifact on 127.0.0.1:8001 (gRPC) and :8002 (metrics, status page)"
    )
    return 0


def convert() -> Path:
    """Convert the checkpoint into the demo's repository; return the artifact's directory."""
    print(f"== converting all-MiniLM-L6-v2 (fp32) into {display_path(REPOSITORY)}", flush=True)
    return publish(REPOSITORY)


def _timed(client: Client, sentence: str) -> float:
    started = time.perf_counter()
    client.embed(sentence)
    return time.perf_counter() - started


def wait_until_measured(client: Client, http_address: str, wanted: int = 100) -> LiveDrift:
    """Return the live drift once ``wanted`` requests were measured; sends more sentences until then.

    The shadow never delays a response: while the fp32 reference is loading or busy it drops samples, and counts them.
    """
    more, drift = cycle(sentences(200)), live_drift.read(http_address)

    def measured() -> LiveDrift | None:
        nonlocal drift
        client.embed(next(more))
        drift = live_drift.read(http_address)
        return drift if drift.measured >= wanted else None

    return wait(f"the shadow to measure {wanted} requests", measured, lambda: drift.progress)


# --- results ----------------------------------------------------------------------------------------------------------


def print_similarity(embeddings: NDArray[np.float64]) -> None:
    """Print the cosine similarity of every pair; DemoFailed unless each sentence is nearest to its paraphrase."""
    similarity = embeddings @ embeddings.T
    print("\n== similarity (cosine of mean-pooled embeddings, computed from bf16 weights)")
    for row, sentence in zip(similarity, EVERYDAY, strict=True):
        print(f"   {sentence:<46}" + "".join(f"{value:7.3f}" for value in row))
    nearest = (similarity - 2 * np.eye(len(EVERYDAY))).argmax(axis=1)
    if any(int(found) != index ^ 1 for index, found in enumerate(nearest)):
        raise DemoFailed(f"the nearest sentences are {nearest.tolist()}, not each other's paraphrase")


def print_latency(latencies: list[float]) -> None:
    """Print percentiles over single-sentence requests, one in flight, as measured by the client."""
    p50, p99 = np.percentile(latencies, [50, 99]) * 1e3
    print(f"\n== latency of {len(latencies)} real sentences, one in flight, the fp32 shadow at work beside them")
    print(f"   p50 {p50:.1f} ms   p99 {p99:.1f} ms")


def print_drift(drift: LiveDrift) -> None:
    """Print live drift beside the converter's measurement; DemoFailed if it is over budget."""
    outcomes = ", ".join(f"{count:.0f} {outcome}" for outcome, count in drift.outcomes.items())
    print(f"\n== live drift from fp32, read from /metrics ({outcomes})")
    for row in drift.rows:
        measured = f"mean {row.mean:.2e}   at conversion {row.baseline:.2e}   {row.ratio:.2f} of budget"
        print(f"   {row.output:<20}{row.metric:<17}{measured}")
    if any(row.ratio > 1 for row in drift.rows):
        raise DemoFailed("live drift is over budget")


def print_sizes(artifact: Path) -> None:
    """Print the size of each file on disk, and of the served files, against the fp32 checkpoint."""
    source = (minilm.checkpoint() / "model.safetensors").stat().st_size
    files = {file.name: file.stat().st_size for file in sorted(artifact.iterdir())}
    print(f"\n== sizes (the fp32 checkpoint has {source / MB:.1f} MB)")
    for name, size in files.items():
        print(f"   {name:<24}{size / MB:9.2f} MB")
    served_bytes = sum(files.get(name, 0) for name in SERVED_FILES)
    print(f"   {served_bytes / source:.3f} of the checkpoint for one ONNX profile ({', '.join(SERVED_FILES)})")
    restorable = served_bytes + files.get("residual.bin", 0)
    print(f"   {restorable / source:.3f} with residual.bin, which restores the fp32 checkpoint bit for bit")


if __name__ == "__main__":
    sys.exit(main())
