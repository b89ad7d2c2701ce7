"""``python -m bench.gpu.roofline ARTIFACT --dim batch=64 --dim seq=128``: the times that GPUs' data sheets allow.

Predicted from the artifact's own graphs, never measured: bf16 from cuda.onnx, fp32 and TF32 from its reference.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.costs import Costs, NotCosted, costs
from bench.gpu.devices import DEVICES, Device
from bf16kit.artifact.artifact import Artifact
from bf16kit.messages.errors import Bf16kitError

PRECISIONS = ("bf16", "tf32", "fp32")


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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code: 2 for an artifact that cannot be costed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.roofline", description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE", help="of a named dimension")
    parser.add_argument("--layers", action="store_true", help="every node of the bf16 graph as well")
    chosen = parser.parse_args(arguments)
    try:
        dims = {name: int(size) for name, _, size in (each.partition("=") for each in chosen.dim)}
        model = Model.of(chosen.artifact, dims)
    except (Bf16kitError, NotCosted, ValueError) as error:
        print(f"roofline: {error}", file=sys.stderr)
        return 2
    print("predicted from data sheets, never measured\n")
    if chosen.layers:
        print(layers(model.narrow))
    print(text(model))
    return 0


def text(model: Model) -> str:
    """The predictions in lines, and how much the graph computes and moves."""
    narrow = model.narrow
    flops, moved = (sum(getattr(node, field) for node in narrow.nodes) for field in ("flops", "bytes"))
    lines = [
        f"{flops / 1e9:.3f} GFLOP, {moved / 1e6:.1f} MB through nodes, {narrow.least_bytes / 1e6:.1f} MB at least\n",
        f"{'':6} {'':5} {'at least ms':>12} {'by node ms':>12} {'÷ bf16':>7} {'products bound':>15} {'launches':>9}",
    ]
    for name, device in DEVICES.items():
        predicted = model.on(device)
        for precision in PRECISIONS:
            one = predicted[precision]
            ratio = one.by_node / predicted["bf16"].by_node
            lines.append(
                f"{name:6} {precision:5} {one.least * 1e3:12.4f} {one.by_node * 1e3:12.4f} {ratio:7.2f}"
                f" {one.bound:15.0%} {one.launches:9}"
            )
    return "\n".join(lines)


def layers(of: Costs) -> str:
    """Every node that computes or moves anything, and their sum by operator."""
    rows = [
        f"{node.op:20} {node.precision:5} {node.flops:16,} {node.bytes:14,}  {node.name}"
        for node in of.nodes
        if node.bytes
    ]
    flops, moved = Counter[str](), Counter[str]()
    for node in of.nodes:
        flops[node.op] += node.flops
        moved[node.op] += node.bytes
    sums = [f"{op:20} {'':5} {flops[op]:16,} {moved[op]:14,}  all" for op, _ in moved.most_common() if moved[op]]
    return "\n".join([f"{'operator':20} {'':5} {'FLOP':>16} {'bytes':>14}", *rows, "", *sums, ""])


if __name__ == "__main__":
    sys.exit(main())
