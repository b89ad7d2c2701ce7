"""The end of ``make demo``: shows on a copy that is damaged on purpose what a server does about a breach.

The query weights of two layers are swapped in the copy's graph, as a faulty deployment script might do, and all digests
are updated. The golden samples still show the damage, so ``bf16-serve check`` refuses the copy. Only when they are left
out as well is it served, and live traffic shows the damage.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from itertools import cycle
from pathlib import Path

import live_drift
import numpy as np
import onnx
from client import Client
from publish import MODEL, program_path
from running import PATIENCE_SECONDS, DemoFailed, display_path, running_server, wait
from sentences import sentences

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import Manifest
from bf16kit.artifact.reading import Digests

LAYERS = (2, 3)
SWAPPED = tuple(f"encoder.layer.{layer}.attention.self.query.weight" for layer in LAYERS)
SERVING = """# Every request is measured, and fp32 answers once bf16 is over its budget beyond chance.
profile: cpu
shadow: {rate: 1.0, max_per_second: 1000}
fallback: fp32
"""
ENOUGH = 500  # measured samples; a dozen suffice
SENTENCE = "A man is eating a piece of bread."


def show(artifact: Path, repository: Path) -> None:
    """Damage a copy of ``artifact`` in ``repository``; show its refusal, then how traffic reveals the damage."""
    layers = " and ".join(map(str, LAYERS))
    print(
        f"\n== a damaged copy, in {display_path(repository)}: the query weights of layers {layers} are swapped",
        flush=True,
    )
    target = damage(artifact, repository)
    print(f"   refused at load: {_refusal(repository)}")
    _write_manifest(target, Artifact.open(target).manifest.model_copy(update={"golden": None}))
    print(
        "   Without its golden samples nothing shows at load: the copy is served, and only traffic can tell.",
        flush=True,
    )
    with running_server(repository) as (grpc_address, http_address), Client(grpc_address) as client:
        before = client.embed(SENTENCE)
        started, more, drift = time.perf_counter(), cycle(sentences(200)), live_drift.read(http_address)

        def fp32_answers() -> bool:
            nonlocal drift
            client.embed(next(more))
            drift = live_drift.read(http_address)
            if client.precision != "fp32" and drift.measured > ENOUGH:
                raise DemoFailed(f"bf16 still answers after {drift.measured} measured samples of the damaged copy")
            return client.precision == "fp32"

        wait("fp32 to answer in bf16's place", fp32_answers, lambda: drift.progress)
        took = time.perf_counter() - started
        print(f"   fp32 answers after {took:.1f} s and {drift.measured} measured samples, because")
        print(f"   {_reason(http_address)}")
        after = client.embed(SENTENCE)
        print(f"   the same sentence, embedded before and after: cosine {float(np.dot(before, after)):.4f}")
        print(f"   every response says so: parameters['precision'] = {client.precision!r}")


def _refusal(repository: Path) -> str:
    """Return why a server would not serve the damaged copy; DemoFailed if it would."""
    command = [program_path("bf16-serve"), "check", "--repository", str(repository), "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 1:
        raise DemoFailed(f"bf16-serve check ended with exit code {done.returncode} on a damaged copy: {done.stderr}")
    text = next(str(f["text"]) for f in json.loads(done.stdout)["findings"] if f["outcome"] == "failed")
    first, *more = text.split("; ")
    return first + (f", and {len(more)} more" if more else "")


def _reason(http_address: str) -> str:
    with urllib.request.urlopen(f"http://{http_address}/status.json", timeout=PATIENCE_SECONDS) as reply:
        (model,) = json.load(reply)["models"]
    return str(model["running"]["active_precision_reason"])


def damage(artifact: Path, repository: Path) -> Path:
    """Copy ``artifact`` with wrong weights and right digests; return the copy."""
    target = repository / MODEL / "1"
    shutil.rmtree(repository, ignore_errors=True)
    shutil.copytree(artifact, target)
    graph = target / "cpu.onnx"
    model = onnx.load(graph, load_external_data=False)
    other = dict(zip(SWAPPED, reversed(SWAPPED), strict=True))
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = other.get(name, name)
    graph.write_bytes(model.SerializeToString())
    manifest = Artifact.open(artifact).manifest
    _write_manifest(
        target, manifest.model_copy(update={"files": manifest.files | {graph.name: Digests().entry(graph)}})
    )
    (target.parent / "serving.yaml").write_text(SERVING, "utf-8")
    return target


def _write_manifest(artifact: Path, manifest: Manifest) -> None:
    (artifact / "manifest.json").write_bytes(manifest.dumps())
