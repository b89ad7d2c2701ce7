"""What bf16 cost MiniLM on real sentences, measured anew rather than read from the manifest.

Each sentence is run alone and unpadded, so that every token measured is a real one. Token outputs are compared as the
model gives them; the pooled ones are the sentence embeddings that people compute from them (mean over tokens, unit
length). That the reference is the checkpoint is checked too, against PyTorch running the checkpoint itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.core import models
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bf16kit.artifact.artifact import Artifact
from bf16kit.drift.metrics import DriftSummary, SampleDrift, compare
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Runtime
from bf16kit.runtime.loading import load, load_reference
from converter.verify.running import open_profile

_TOKENS_AT_MOST = 5e-3
_POOLED_AT_MOST = 3e-5
_REFERENCE_AT_MOST = 1e-5  # fp32 rounding, in another order of summation
_SENTENCES = 200
_QUICK = 20
_OUTPUT = "last_hidden_state"
_TOKENS = TensorSpec(_OUTPUT, "float32", (1, "seq", 384), "embedding")
_POOLED = TensorSpec("sentence", "float64", (1, 384), "embedding")

Feed = Mapping[str, NDArray[np.int64]]
Run = Callable[[Feed], NDArray[np.float32]]  # the token outputs [1, seq, 384] of one sentence


@dataclass(frozen=True, slots=True)
class Drift:
    """Of one way to run the model from the reference, over all sentences."""

    tokens: DriftSummary
    pooled: DriftSummary


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Drift of the ``cpu`` profile, of the emulated ``cuda`` profile, and of the reference from PyTorch."""
    models.demo_on_path()
    import minilm

    artifact = Artifact.open(workspace.minilm())
    feeds = list(minilm.calibration(_QUICK if quick else _SENTENCES))
    run_reference = _tokens(load_reference(artifact))
    reference = [run_reference(feed) for feed in feeds]
    cpu = _drift(reference, _tokens(load(artifact, "cpu")), feeds)
    runtime, emulated = open_profile(artifact, "cuda")
    cuda = _drift(reference, _tokens(runtime), feeds)
    source = _drift(reference, _pytorch(minilm.checkpoint()), feeds)
    return Result(
        "drift_minilm",
        (
            *_measurements("cpu", cpu, tokens_at_most=_TOKENS_AT_MOST, pooled_at_most=_POOLED_AT_MOST),
            *_measurements("cuda, emulated" if emulated else "cuda", cuda),
            Measurement(
                "PyTorch in fp32: relative_l2 of tokens, worst",
                source.tokens.stats["relative_l2"]["worst"],
                at_most=_REFERENCE_AT_MOST,
            ),
        ),
        settings={"model": "all-MiniLM-L6-v2", "sentences": len(feeds), "source": "prose of Python's documentation"},
        notes=(
            "the candidate of the last line is PyTorch running the checkpoint: the reference is the model",
            *(["cuda is emulated on the CPU, and not verified on a device"] if emulated else []),
        ),
    )


def _measurements(
    name: str, drift: Drift, *, tokens_at_most: float | None = None, pooled_at_most: float | None = None
) -> Iterator[Measurement]:
    tokens, pooled = drift.tokens.stats["relative_l2"], drift.pooled.stats["cosine_distance"]
    yield Measurement(f"{name}: relative_l2 of tokens, mean", tokens["mean"], at_most=tokens_at_most)
    yield Measurement(f"{name}: relative_l2 of tokens, p99", tokens["p99"])
    yield Measurement(f"{name}: relative_l2 of tokens, worst", tokens["worst"])
    yield Measurement(f"{name}: cosine_distance pooled, mean", pooled["mean"], at_most=pooled_at_most)
    yield Measurement(f"{name}: cosine_distance pooled, p99", pooled["p99"])
    yield Measurement(f"{name}: cosine_distance pooled, worst", pooled["worst"])


def _drift(reference: Sequence[NDArray[np.float32]], run: Run, feeds: Sequence[Feed]) -> Drift:
    import minilm

    tokens, pooled = list[SampleDrift](), list[SampleDrift]()
    for expected, feed in zip(reference, feeds, strict=True):
        found, mask = run(feed), feed["attention_mask"]
        tokens += compare(expected, found, _TOKENS, 0).rows
        pooled += compare(minilm.mean_pool(expected, mask), minilm.mean_pool(found, mask), _POOLED, 0).rows
    return Drift(DriftSummary.of(tokens), DriftSummary.of(pooled))


def _tokens(runtime: Runtime) -> Run:
    return lambda feed: runtime.run(feed, [_OUTPUT])[_OUTPUT]


def _pytorch(checkpoint: Path) -> Run:
    """The checkpoint itself in fp32, by the library it was published for."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoint).eval()

    def run(feed: Feed) -> NDArray[np.float32]:
        with torch.inference_mode():
            found = model(**{name: torch.from_numpy(array) for name, array in feed.items()})
        return np.asarray(found.last_hidden_state.numpy())

    return run
