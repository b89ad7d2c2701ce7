"""``make demo``: convert all-MiniLM-L6-v2, serve it, embed real sentences, and print the cost of bf16.

At the end it serves a copy that was damaged on purpose, and shows how the server detects that and what it does.

Everything runs as a user would run it: the two programs as processes, and a plain tritonclient without bf16kit. A
second run converts again and replaces the artifact. Exit code 0 when every step worked.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
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
from running import DemoFailed, T, display_path, running_server, wait
from sentences import sentences

from bf16kit.artifact.artifact import Artifact
from bf16kit.runtime.loading import load, load_reference

REPOSITORY = Path(__file__).parents[2] / "build" / "demo"
MB = 1e6
WEIGHTS, RESIDUAL = ("weights.bf16", "weights.fp32"), ("residual.bin",)

EVERYDAY = (
    "A man is eating a piece of bread.",
    "Someone is having a meal.",
    "The invoice is due at the end of the month.",
    "Please pay the bill before the thirtieth.",
)


def main() -> int:
    """Run the demo; 0 when all of it worked."""
    try:
        artifact = convert()
        with running_server(REPOSITORY) as (grpc_address, http_address), Client(grpc_address) as client:
            print_similarity(np.stack([client.embed(sentence) for sentence in EVERYDAY]))
            served = [_timed(client.embed, sentence) for sentence in sentences(100)]
            print_drift(wait_until_measured(client, http_address))
            profile = client.profile
        print_latency(served, *alone(artifact, profile))
        print_sizes(artifact)
        breach.show(artifact, REPOSITORY.with_name("demo-damaged"))
    except (DemoFailed, PublishFailed, FileNotFoundError, triton.InferenceServerException) as failure:
        print(f"\ndemo failed: {failure}", file=sys.stderr)
        return 1
    print(f"""
== done. To see more:
   {display_path(artifact / "report.html")}   the report: accuracy, sizes and precision plan, for a browser
   make serve   serves the same artifact on 127.0.0.1:8001 (gRPC); status page: http://127.0.0.1:8002/""")
    return 0


def convert() -> Path:
    """Convert the checkpoint into the demo's repository; return the artifact's directory."""
    print(f"== converting all-MiniLM-L6-v2 (fp32) into {display_path(REPOSITORY)}", flush=True)
    return publish(REPOSITORY)


def _timed(call: Callable[[T], object], argument: T) -> float:
    started = time.perf_counter()
    call(argument)
    return time.perf_counter() - started


def alone(artifact: Path, profile: str) -> tuple[list[float], list[float]]:
    """Return the seconds of runs of ``profile`` and of its fp32 reference, in this process and in turns."""
    opened, encoder = Artifact.open(artifact), minilm.tokenizer()
    runtimes = load(opened, profile), load_reference(opened)
    try:
        feeds = [minilm.tokenize(encoder, [sentence]) for sentence in sentences(100)]
        for feed in feeds[:10]:  # not measured: first runs allocate
            for runtime in runtimes:
                runtime.run(feed)
        times = [[_timed(runtime.run, feed) for runtime in runtimes] for feed in feeds]
    finally:
        for runtime in runtimes:
            runtime.close()
    bf16, fp32 = zip(*times, strict=True)
    return list(bf16), list(fp32)


def wait_until_measured(client: Client, http_address: str, wanted: int = 50) -> LiveDrift:
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


def print_latency(served: list[float], bf16: list[float], fp32: list[float]) -> None:
    """Print percentiles over single sentences: as a client sees them, and of the model alone."""
    print("\n== latency of real sentences, one at a time")
    labels = (
        "bf16, the model alone",
        "fp32, the model alone, in turns with bf16",
        "bf16, served, while drift is measured",
    )
    for label, seconds in zip(labels, (bf16, fp32, served), strict=True):
        p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
        print(f"   {label:<44}p50 {p50:5.1f} ms   p99 {p99:5.1f} ms")


def print_drift(drift: LiveDrift) -> None:
    """Print live drift beside the converter's measurement; DemoFailed if it is over budget."""
    runs, dropped, failed = (drift.outcomes.get(name, 0) for name in ("measured", "dropped", "failed"))
    print("\n== live drift from fp32, read from /metrics")
    print(f"   {runs:.0f} requests were run in fp32 too; {failed:.0f} failed; {dropped:.0f} were dropped,")
    print("   because fp32 was loading or busy: no response waits for it")
    for row in (row for row in drift.rows if row.metric == "relative_l2"):
        measured = f"mean {row.mean:.2e}   at conversion {row.baseline:.2e}   {row.ratio:.2f} of budget"
        print(f"   {row.output:<20}{row.metric:<17}{measured}")
    if any(row.ratio > 1 for row in drift.rows):
        raise DemoFailed("live drift is over budget")


def print_sizes(artifact: Path) -> None:
    """Print what the artifact takes on disk, and what of it is in memory, against the fp32 checkpoint."""
    source = (minilm.checkpoint() / "model.safetensors").stat().st_size
    files = {file.name: file.stat().st_size for file in artifact.iterdir()}
    weights, residual = (sum(files.get(name, 0) for name in names) for names in (WEIGHTS, RESIDUAL))
    rest = sum(files.values()) - weights - residual
    print(f"\n== sizes (the fp32 checkpoint has {source / MB:.1f} MB)")
    for label, size in (
        ("weights, in memory while the model is served", weights),
        ("residual, from which fp32 is restored bit for bit", residual),
        ("graphs, manifest, golden samples, report", rest),
        ("on disk, total", weights + residual + rest),
    ):
        print(f"   {label:<51}{size / MB:6.1f} MB   {size / source:.3f} of the checkpoint")


if __name__ == "__main__":
    sys.exit(main())
