"""Locates drift: measures the SQNR of every layer of the graph, beside the SQNR that rounding alone should leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from bf16kit.drift.budget import Budget
from bf16kit.drift.measurements import MARGIN_DB, LayerEntry
from bf16kit.messages.errors import ArtifactError
from bf16kit.runtime.memory.weights import Weights, rebuilt_weights
from converter.graph.operators import WEIGHTED, label
from converter.islands.result import decibels
from converter.plan import narrowed
from converter.plan.profiles import PROFILES
from converter.source import Feeds
from converter.verify import layernoise
from converter.verify.emulate import emulation
from converter.verify.layernoise import Graph, Power, Rounded, compare, operands


@dataclass(frozen=True, slots=True)
class Trace:
    """The powers of all values that a reference and a profile both have, measured on the same feeds."""

    graph: ir.Graph  # the source's, as the reference holds it
    powers: Mapping[str, Power]
    predicted: Mapping[ir.Value, float]  # noise ÷ signal

    def layers(self) -> list[LayerEntry]:
        """Return every node whose result both graphs have, in the order of the source's graph.

        Nodes whose result went into a fused operator, or is not fp32, are left out.
        """
        depths = layernoise.depth(self.graph)
        return [self.layer(node, depths) for node in self.graph if self.has(node.outputs[0])]

    def layer(self, node: ir.Node, depths: Mapping[ir.Value, int] | None = None) -> LayerEntry:
        """Return ``node`` as a layer; if its result went into a fused operator, with the SQNR of that one's result."""
        value = seen = node.outputs[0]
        while not self.has(seen):
            seen = next(use.node for use in seen.uses()).outputs[0]
        depths = depths or layernoise.depth(self.graph)
        return LayerEntry(
            name=node.name or "",
            op=label(node),
            weight=_weight(node),
            depth=depths[value],
            sqnr_db=self.sqnr(seen),
            expected_db=self.predicted_sqnr(seen),
        )

    def has(self, value: ir.Value) -> bool:
        """Whether both graphs have ``value``."""
        return value.name in self.powers

    def sqnr(self, value: ir.Value) -> float:
        """Return the SQNR in dB of a ``value`` that both graphs have."""
        return decibels(self.powers[value.name or ""].ratio)

    def predicted_sqnr(self, value: ir.Value) -> float:
        """Return the SQNR in dB that ``value`` should have if there were only rounding noise."""
        return decibels(self.predicted[value])

    def shortfall(self, value: ir.Value) -> float:
        """Return the dB below the predicted SQNR; 0 for a value that only the reference has."""
        return self.predicted_sqnr(value) - self.sqnr(value) if self.has(value) else 0.0


@dataclass(frozen=True, slots=True)
class NoisyOutput:
    """An output with more noise than predicted or allowed, and the node at which its noise fell below the predicted
    SQNR, None if it never did."""

    output: ir.Value
    node: ir.Node | None


def find_noisy_output(trace: Trace, budget: Budget) -> NoisyOutput | None:
    """Return the worst output that is below its predicted SQNR or exceeds ``budget`` in relative_l2, else None."""
    bound = budget.bounds.get("relative_l2", math.inf)
    allowed = -20 * math.log10(bound) if 0 < bound < math.inf else -math.inf
    outputs = [v for v in trace.graph.outputs if v.producer() is not None and trace.has(v)]  # no input passed through
    found = [(max(trace.predicted_sqnr(v) - MARGIN_DB, allowed) - trace.sqnr(v), v) for v in outputs]
    missing, worst = max(found, key=lambda each: each[0], default=(0.0, None))
    return NoisyOutput(worst, _noise_source(trace, worst)) if worst is not None and missing > 0 else None


def _noise_source(trace: Trace, output: ir.Value) -> ir.Node | None:
    """Follow the noise of ``output`` upstream, each time to the source farthest below its predicted SQNR, and return
    the node where the last stretch below it begins.

    If several nodes were fused into one, the product is returned. A stretch lasts as long as values are below by half
    the margin, so that one value near the edge does not split it.
    """
    path = [output]
    while sources := _nearest_sources(trace, path[-1])[1]:
        path.append(max(sources, key=trace.shortfall))
    below = [trace.shortfall(value) for value in path]
    begin = next((index for index, shortfall in enumerate(below) if shortfall > MARGIN_DB), None)
    if begin is None:
        return None
    stretch = takewhile(lambda index: below[index] > MARGIN_DB / 2, range(begin, len(path)))
    nodes, _ = _nearest_sources(trace, path[max(index for index in stretch if below[index] > MARGIN_DB)])
    return next((node for node in nodes if node.op_type in WEIGHTED), nodes[0])


def _nearest_sources(trace: Trace, value: ir.Value) -> tuple[list[ir.Node], list[ir.Value]]:
    """Return the nodes that compute ``value``, and the nearest values they read that both graphs have."""
    nodes: list[ir.Node] = []
    sources: list[ir.Value] = []
    waiting = [value]
    while waiting:
        node = waiting.pop().producer()
        if node is None or node in nodes:
            continue
        nodes.append(node)
        for operand in operands(node):
            (sources if trace.has(operand) else waiting).append(operand)
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
        found = artifact.manifest.profiles.items()
        known = ", ".join(sorted(name for name, each in found if each.format == "onnx")) or "none"
        raise ArtifactError(f"{artifact.path}: has no ONNX profile {profile!r} to explain; it has {known}")
    path = artifact.file(entry.graph)
    # the CPU kernel runs here as it does when served
    model = ir.load(path) if PROFILES[profile].uses_kernel else _parsed(emulation(path))
    powers = compare(reference, Graph(model, artifact.path, {}), feeds)
    nodes = frozenset(each.name for each in plan.nodes.get(profile, []) if each.precision == "bf16")
    reading = frozenset(each.name for each in plan.nodes.get(profile, []) if each.code == "rounds")
    rounded = Rounded(narrowed(plan.tensors), nodes - reading, reading)
    graph = reference.model.graph
    return Trace(graph, powers, layernoise.predicted(graph, rounded, _mean_squares(artifact, powers)))


def _parsed(data: bytes) -> ir.Model:
    return ir.serde.deserialize_model(onnx.load_from_string(data))


def _weight(node: ir.Node) -> str:
    names = (value.name for value in node.inputs if value is not None and value.is_initializer() and value.shape)
    return next((name for name in names if name), "")


def _mean_squares(artifact: Artifact, powers: Mapping[str, Power]) -> Callable[[ir.Value], float]:
    """Return a function that gives a value's mean square: measured for computed values, from the data for weights."""
    weights = {entry.name for entry in artifact.manifest.tensors}

    def mean_square(value: ir.Value) -> float:
        name, tensor = value.name or "", value.const_value
        if name in powers:
            return powers[name].mean
        if not value.is_initializer() or (tensor is None and name not in weights):
            return math.nan
        return _mean_square(artifact.tensor(name) if name in weights or tensor is None else tensor.numpy())

    return mean_square


def _mean_square(array: np.typing.NDArray[np.generic]) -> float:
    return float(np.mean(np.square(array, dtype=np.float64))) if array.size else math.nan
