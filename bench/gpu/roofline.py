"""The times that GPUs' data sheets allow; :mod:`bench.gpu.predicted` makes tables of them.

Predicted from the artifact's own graphs, never measured: bf16 from cuda.onnx, fp32 and TF32 from its reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.gpu.costs import Costs, NotCosted, costs
from bench.gpu.devices import Device
from bf16kit.artifact.artifact import Artifact


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one run on a device, inputs and outputs in its memory.

    ``least``: the products at the peak rate, or weights, inputs and outputs through memory once, whichever is longer:
    no program is faster. ``by_node``: each node by itself, with all that it reads and writes through memory; caches and
    fusion beat it, launches and products below the peak rate lose to it. ``bound``: the share of ``by_node`` in nodes
    whose arithmetic takes longer than their memory. ``launches``: nodes that do anything.
    """

    least: float
    by_node: float
    bound: float
    launches: int


def predict(of: Costs, device: Device, wide: str = "fp32") -> Prediction:
    """Of a graph on a device, whose fp32 products run in ``wide``: fp32, or tf32."""
    rates = {"bf16": device.flops["bf16"], "fp32": device.flops[wide]}
    arithmetic = [node.flops / rates[node.precision] for node in of.nodes]
    memory = [node.bytes / device.bandwidth for node in of.nodes]
    each = [max(pair) for pair in zip(arithmetic, memory, strict=True)]
    by_node = sum(each)
    busy = sum(seconds for seconds, products in zip(each, arithmetic, strict=True) if products and products == seconds)
    return Prediction(
        least=max(sum(arithmetic), of.least_bytes / device.bandwidth),
        by_node=by_node,
        bound=busy / by_node if by_node else 0.0,
        launches=sum(node.bytes > 0 for node in of.nodes),
    )


@dataclass(frozen=True, slots=True)
class Model:
    """The costs of an artifact's two graphs at one size."""

    narrow: Costs
    reference: Costs

    @classmethod
    def of(cls, artifact: Path, dims: dict[str, int]) -> Model:
        """NotCosted, or Bf16kitError, for one of which that cannot be told."""
        opened = Artifact.open(artifact)
        entry = opened.manifest.profiles.get("cuda")
        if entry is None or opened.manifest.reference is None:
            raise NotCosted(f"{artifact}: has no cuda profile, or no reference; convert it with --profile cuda")
        return cls(costs(opened.file(entry.graph), dims), costs(opened.file(opened.manifest.reference), dims))

    def on(self, device: Device) -> dict[str, Prediction]:
        """By precision."""
        wide = {each: predict(self.reference, device, each) for each in ("tf32", "fp32")}
        return {"bf16": predict(self.narrow, device), **wide}
