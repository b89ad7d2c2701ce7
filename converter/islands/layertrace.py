"""Locates drift: measures the SQNR of every layer of the graph, beside the SQNR that rounding alone should leave."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.graph.operators import WEIGHTED, label
from bf16kit.converter.plan import narrowed
from bf16kit.converter.plan.profiles import PROFILES
from bf16kit.converter.source import Feeds
from bf16kit.converter.verify import layernoise
from bf16kit.converter.verify.layernoise import Graph, Rounded, compare, operands
from bf16kit.converter.verify.running import emulation
from bf16kit.drift.budget import Budget
from bf16kit.drift.measurements import MARGIN_DB, MOST_DB, LayerEntry
from bf16kit.messages.errors import ArtifactError
from bf16kit.runtime.memory.weights import Weights, rebuilt_weights


@dataclass(frozen=True, slots=True)
class Trace:
    """The SQNR in dB of all values that a reference and a profile both have, measured on the same feeds.

    ``graph`` is the source's, as the reference holds it. ``predicted`` is the SQNR that each of its values should have
    if there were only rounding noise, and ``depth`` the number of products before it.
    """

    graph: ir.Graph
    sqnr: Mapping[ir.Value, float]
    predicted: Mapping[ir.Value, float]
    depth: Mapping[ir.Value, int]

    def layers(self) -> list[LayerEntry]:
        """Return every node of which both graphs have a result, in the order of the source's graph.

        Nodes whose result went into a fused operator, or is not fp32, are left out.
        """
        return [self.layer(node) for node in self.graph if not self.sqnr.keys().isdisjoint(node.outputs)]

    def layer(self, node: ir.Node) -> LayerEntry:
        """Return ``node`` as a layer; if its result went into a fused operator, with the SQNR of that one's result."""
        results = [*node.outputs]  # the first may be left out, as that of an LSTM of which only the last state is read
        for seen in results:  # which grows, by each value once however many ways lead to it
            if seen in self.sqnr:
                break
            results += dict.fromkeys(v for use in seen.uses() for v in use.node.outputs if v not in results)
        inputs = (v for v in node.inputs if v is not None and v.name and v.is_initializer() and v.shape)
        # Equal tensors are stored once, under the name of the first: that names no layer.
        weights = (v.name or "" for v in inputs if len({use.node for use in v.uses()}) == 1)
        return LayerEntry(
            name=node.name or "",
            op=label(node),
            weight=next(weights, ""),
            depth=self.depth[node.outputs[0]],
            sqnr_db=self.sqnr[seen],
            expected_db=self.predicted[seen],
        )

    def shortfall(self, value: ir.Value) -> float:
        """Return the dB below the predicted SQNR; 0 for a value that only the reference has."""
        return self.predicted[value] - self.sqnr[value] if value in self.sqnr else 0.0

    def noisy_output(self, budget: Budget) -> ir.Value | None:
        """Return the worst output that is below its predicted SQNR or exceeds ``budget`` in relative_l2, else None."""
        bound = budget.bounds.get("relative_l2", math.inf)
        allowed = -20 * math.log10(bound) if 0 < bound < math.inf else -math.inf
        outputs = [value for value in self.graph.outputs if value in self.sqnr]  # no input passed through
        missing = {v: max(self.predicted[v] - MARGIN_DB, allowed) - self.sqnr[v] for v in outputs}
        worst = max(outputs, key=missing.__getitem__, default=None)
        return worst if worst is not None and missing[worst] > 0 else None

    def noise_source(self, output: ir.Value) -> ir.Node | None:
        """Return the node at which the noise of ``output`` fell below the predicted SQNR; None if it never did.

        The noise is followed upstream, each time to the source farthest below its predicted SQNR, to where the last
        stretch below it begins. If several nodes were fused into one, the product is returned. A stretch lasts as long
        as values are below by half the margin, so that one value near the edge does not split it.
        """
        path = [output]
        while sources := self._nearest_sources(path[-1])[1]:
            path.append(max(sources, key=self.shortfall))
        below = [self.shortfall(value) for value in path]
        begin = next((index for index, shortfall in enumerate(below) if shortfall > MARGIN_DB), None)
        if begin is None:
            return None
        stretch = takewhile(lambda index: below[index] > MARGIN_DB / 2, range(begin, len(path)))
        nodes, _ = self._nearest_sources(path[max(index for index in stretch if below[index] > MARGIN_DB)])
        return next((node for node in nodes if node.op_type in WEIGHTED), nodes[0])

    def _nearest_sources(self, value: ir.Value) -> tuple[list[ir.Node], list[ir.Value]]:
        """Return the nodes that compute ``value``, and the nearest values they read that both graphs have."""
        nodes: list[ir.Node] = []
        sources: list[ir.Value] = []
        waiting = [value]
        while waiting:
            node = waiting.pop().producer()
            if node is not None and node not in nodes:
                nodes.append(node)
                for operand in operands(node):
                    (sources if operand in self.sqnr else waiting).append(operand)
        return nodes, sources


@contextmanager
def open_reference(artifact: Artifact, scratch: Path | None = None, rebuilt: Weights | None = None) -> Iterator[Graph]:
    """Open the fp32 graph of ``artifact``, its weights ``rebuilt`` or rebuilt here; ArtifactError without one."""
    name = artifact.manifest.reference
    if name is None and artifact.manifest.checkpoint:
        raise ArtifactError(
            f"{artifact.path}: no ONNX graph could be made of its source, so its layers cannot be explained"
        )
    if name is None:
        raise ArtifactError(
            f"{artifact.path}: was converted with --no-residual and keeps no fp32 reference to compare with;"
            " convert the checkpoint again with the residual"
        )
    graph = artifact.file(name)
    with nullcontext(rebuilt) if rebuilt is not None else rebuilt_weights(artifact, graph, scratch) as weights:
        base = weights.base_dir or artifact.path
        model = ir.load(weights.model) if isinstance(weights.model, Path) else _parsed(weights.model)
        ir.external_data.set_base_dir(model.graph, base)
        yield Graph(model, base, _in_memory(model, weights.files))


def _in_memory(model: ir.Model, files: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the initializers that are in ``files``, which exist in memory only, by name."""
    found = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and str(tensor.location) in files:
            start = tensor.offset or 0
            raw = files[str(tensor.location)][start : start + tensor.nbytes]
            found[name] = raw.view(tensor.dtype.numpy()).reshape(tensor.shape.numpy())
    return found


def trace(reference: Graph, artifact: Artifact, feeds: Sequence[Feeds], profile: str) -> Trace:
    """Run ``profile`` and the reference on ``feeds``, and compare all values that both have.

    The cuda profile is emulated on the CPU. Raises :class:`ArtifactError` if the artifact has no such ONNX profile, and
    :class:`RuntimeFailure` if a graph does not run.
    """
    plan, entry = artifact.manifest.plan, artifact.manifest.profiles.get(profile)
    if entry is None or entry.format != "onnx":
        known = ", ".join(sorted(n for n, e in artifact.manifest.profiles.items() if e.format == "onnx")) or "none"
        raise ArtifactError(f"{artifact.path}: has no ONNX profile {profile!r} to explain; it has {known}")
    path = artifact.file(entry.graph)
    # the CPU kernel runs here as it does when served
    model = ir.load(path) if PROFILES[profile].uses_kernel else _parsed(emulation(path))
    powers = compare(reference, Graph(model, artifact.path, {}), feeds)
    weights = {entry.name for entry in artifact.manifest.tensors}

    def mean_square(value: ir.Value) -> float:
        """Return a value's mean square: measured for computed values, from the data for weights."""
        name, tensor = value.name or "", value.const_value
        if name in powers:
            return powers[name].mean
        if not value.is_initializer() or (tensor is None and name not in weights):
            return math.nan
        array = artifact.tensor(name) if name in weights or tensor is None else tensor.numpy()
        return float(np.mean(np.square(array, dtype=np.float64))) if array.size else math.nan

    reading = frozenset(each.name for each in plan.nodes.get(profile, []) if each.code == "rounds")
    rounded = Rounded(narrowed(plan.tensors), narrowed(plan.nodes.get(profile, [])) - reading, reading)
    graph = reference.model.graph
    predicted = layernoise.predicted(graph, rounded, mean_square)
    return Trace(
        graph=graph,
        sqnr={v: decibels(powers[v.name].ratio) for node in graph for v in node.outputs if v.name in powers},
        predicted={value: decibels(ratio) for value, ratio in predicted.items()},
        depth=layernoise.depth(graph),
    )


def decibels(ratio: float) -> float:
    """Convert noise ÷ signal to an SQNR in dB, within ±:data:`~bf16kit.drift.measurements.MOST_DB`."""
    if ratio == 0:
        return MOST_DB
    return max(-MOST_DB, min(MOST_DB, 0.0 - 10 * math.log10(ratio))) if math.isfinite(ratio) else -MOST_DB


def _parsed(data: bytes) -> ir.Model:
    return ir.serde.deserialize_model(onnx.load_from_string(data))
