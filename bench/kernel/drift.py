"""What each way to run MiniLM in bf16 costs: drift from fp32 on real sentences, of our profiles and of the peers.

Each sentence is run alone and unpadded. The reference is ONNX Runtime in fp32; a sentence's drift is the mean over its
tokens of the relative L2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from bench.core import models
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bench.kernel.minilm import subject
from bench.kernel.sides import ONNX_RUNTIME, OURS, PEERS, side
from bench.kernel.turns import copies
from bench.kernel.workers import Workers
from bf16kit.drift.metrics import DriftSummary, compare
from bf16kit.numerics.tensors import TensorSpec

# The `cpu` profile keeps activations in fp32; a profile that rounds them is held to twice the drift.
_AT_MOST = {"cpu": 5e-3, "cpu-bf16": 7e-3}
_SENTENCES, _QUICK = 200, 5
_COMPILED = ("torch fp32, compiled", "torch bf16, compiled", "torch bf16, zentorch")  # each length anew
_TOKENS = TensorSpec("last_hidden_state", "float32", (1, "seq", 384), "embedding")


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Drift of every side, over all sentences."""
    models.demo_on_path()
    import minilm

    root = workspace.root / "drift"
    root.mkdir(parents=True, exist_ok=True)
    files = list[Path]()
    for feed in minilm.calibration(_QUICK if quick else _SENTENCES):
        files.append(root / f"{len(files)}.npz")
        np.savez(files[-1], **dict(feed))  # type: ignore[arg-type]  # no input is called allow_pickle
    sides = [one for one in (*PEERS, *OURS) if one.name not in _COMPILED]
    with (
        copies(sides, subject(workspace), root / "copies") as subjects,
        Workers(sides, subjects, root / "workers.log", root / "compiled") as workers,
    ):
        outputs = {name: found for name in workers.present if (found := _outputs(workers, name, files, root))}
    drifts = {name: _drift(outputs[ONNX_RUNTIME.name], found) for name, found in outputs.items()}
    return Result(
        "kernel_drift",
        list(_measurements(drifts)),
        settings={"model": "all-MiniLM-L6-v2", "sentences": len(files), "reference": ONNX_RUNTIME.name},
        notes=[f"{name}: {reason}" for name, reason in workers.absent.items()],
    )


def _measurements(drifts: Mapping[str, DriftSummary]) -> Iterator[Measurement]:
    for name, summary in drifts.items():
        found = summary.stats["relative_l2"]
        at_most = _AT_MOST[side(name).options["profile"]] if side(name).ours else None
        yield Measurement(f"{name}: relative_l2 of tokens, mean", found["mean"] + 0.0, at_most=at_most)
        yield Measurement(f"{name}: relative_l2 of tokens, worst", found["worst"] + 0.0)  # no −0


def _outputs(workers: Workers, name: str, files: list[Path], root: Path) -> list[np.ndarray]:
    out = root / "outputs.npz"
    answer = workers.ask(name, {"do": "outputs", "feeds": [str(file) for file in files], "out": str(out)})
    if "absent" in answer:
        return []
    with np.load(out) as stored:
        return [stored[f"arr_{index}"] for index in range(len(files))]


def _drift(expected: list[np.ndarray], found: list[np.ndarray]) -> DriftSummary:
    pairs = zip(expected, found, strict=True)
    return DriftSummary.of([row for pair in pairs for row in compare(*pair, _TOKENS, 0).rows])
