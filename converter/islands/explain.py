"""Locates drift: measures the SQNR of every layer of the graph, beside the SQNR that rounding alone should leave."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from bf16kit.artifact.artifact import Artifact
from bf16kit.drift.measurements import MOST_DB, LayerEntry
from bf16kit.messages.errors import ArtifactError
from bf16kit.runtime.memory.rebuilt import rebuilt_weights
from converter.graph.operators import label
from converter.plan import narrowed
from converter.plan.profiles import PROFILES
from converter.source import Feeds
from converter.verify import expectation
from converter.verify.emulate import emulation
from converter.verify.expectation import Rounded
from converter.verify.probing import Graph, Power, compare


@dataclass(frozen=True, slots=True)
class Trace:
    """The powers of all values that a reference and a profile both have, measured on the same feeds."""

    reference: Graph
    rounded: Rounded
    powers: dict[str, Power]
    expected: dict[ir.Value, float]

    @property
    def graph(self) -> ir.Graph:
        """The source's graph, as the reference holds it."""
        return self.reference.model.graph

    def layers(self) -> list[LayerEntry]:
        """Return every node whose result both graphs have, in the order of the source's graph.

        Nodes whose result went into a fused operator, or is not fp32, are left out.
        """
        depths = expectation.depth(self.graph)
        return [layer_entry(self, node, depths) for node in self.graph if self.has(node.outputs[0])]

    def has(self, value: ir.Value) -> bool:
        """Whether both graphs have ``value``."""
        return value.name in self.powers

    def sqnr(self, value: ir.Value) -> float:
        """Return the SQNR in dB of a ``value`` that both graphs have."""
        return decibels(self.powers[value.name or ""].ratio)

    def expected_sqnr(self, value: ir.Value) -> float:
        """Return the expected SQNR of ``value``, in dB."""
        return decibels(self.expected[value])


def layer_entry(traced: Trace, node: ir.Node, depths: Mapping[ir.Value, int] | None = None) -> LayerEntry:
    """Return ``node`` as a layer; if its result went into a fused operator, with the SQNR of that operator's result."""
    value = node.outputs[0]
    seen = value
    while not traced.has(seen):
        seen = next(use.node for use in seen.uses()).outputs[0]
    depths = depths or expectation.depth(traced.graph)
    return LayerEntry(
        name=node.name or "",
        op=label(node),
        weight=_weight(node),
        depth=depths[value],
        sqnr_db=traced.sqnr(seen),
        expected_db=traced.expected_sqnr(seen),
    )


@contextmanager
def open_reference(artifact: Artifact, scratch: Path | None = None) -> Iterator[Graph]:
    """Open the fp32 graph of ``artifact``, its weights rebuilt while the block runs; ArtifactError without one."""
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
    with rebuilt_weights(artifact, artifact.file(name), scratch) as weights:
        base = weights.base_dir or artifact.path
        model = ir.load(weights.model) if isinstance(weights.model, Path) else _parsed(weights.model)
        ir.external_data.set_base_dir(model.graph, base)
        yield Graph(model, base, weights.external)


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
    powers = compare(reference, Graph(_profile_graph(artifact, profile), artifact.path, {}), feeds)
    nodes = frozenset(each.name for each in plan.nodes.get(profile, []) if each.precision == "bf16")
    reading = frozenset(each.name for each in plan.nodes.get(profile, []) if each.code == "rounds")
    rounded = Rounded(narrowed(plan.tensors), nodes - reading, reading)
    means = _Means(artifact, powers)
    return Trace(reference, rounded, powers, expectation.expected(reference.model.graph, rounded, means.of))


def decibels(ratio: float) -> float:
    """Convert noise ÷ signal to an SQNR in dB, within ±:data:`~bf16kit.drift.measurements.MOST_DB`."""
    if ratio == 0:
        return MOST_DB
    return max(-MOST_DB, min(MOST_DB, 0.0 - 10 * math.log10(ratio))) if math.isfinite(ratio) else -MOST_DB


def _profile_graph(artifact: Artifact, profile: str) -> ir.Model:
    path = artifact.file(artifact.manifest.profiles[profile].graph)
    if PROFILES[profile].uses_kernel:  # the CPU kernel runs here as it does when served
        return ir.load(path)
    return _parsed(emulation(path))


def _parsed(data: bytes) -> ir.Model:
    return ir.serde.deserialize_model(onnx.load_from_string(data))


def _weight(node: ir.Node) -> str:
    names = (value.name for value in node.inputs if value is not None and value.is_initializer() and value.shape)
    return next((name for name in names if name), "")


class _Means:
    """The mean square of each value: measured for computed values, from the stored data for weights."""

    def __init__(self, artifact: Artifact, powers: dict[str, Power]) -> None:
        self._artifact = artifact
        self._powers = powers
        self._weights = {entry.name for entry in artifact.manifest.tensors}

    def of(self, value: ir.Value) -> float:
        name = value.name or ""
        if name in self._powers:
            return self._powers[name].mean
        if not value.is_initializer():
            return math.nan
        tensor = value.const_value
        if name in self._weights:
            return _mean_square(self._artifact.tensor(name))
        return math.nan if tensor is None else _mean_square(tensor.numpy())


def _mean_square(array: np.typing.NDArray[np.generic]) -> float:
    return float(np.mean(np.square(array, dtype=np.float64))) if array.size else math.nan
