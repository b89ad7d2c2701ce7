"""Where drift comes from: the SQNR of every layer down the graph, beside what rounding alone should have left of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from bf16kit.artifact import Artifact
from bf16kit.errors import ArtifactError
from bf16kit.runtime.externaldata import REBUILT, initializers
from converter.graph.operators import label
from converter.model import Feeds
from converter.plan import narrowed
from converter.proof import expectation
from converter.proof.emulate import emulation
from converter.proof.expectation import Rounded
from converter.proof.probing import Graph, Power, compare

MOST = 200.0  # dB; what is exact, or infinitely far, is given as ±MOST, so that every figure is a number


@dataclass(frozen=True, slots=True)
class LayerSqnr:
    """How much of a node's result rounding left, over all samples.

    ``name`` is the node's in the source's graph, ``weight`` that of the first weight it reads ("" for none). ``depth``
    counts the products on the longest way to it. ``sqnr_db`` is 10·log10(Σr² / Σ(c−r)²), r the fp32 reference's values
    and c the profile's; ``expected_db`` is the expected line (:mod:`converter.proof.expectation`). Both are within
    ±:data:`MOST`, which stand for exact and infinitely far.
    """

    name: str
    op: str
    weight: str
    depth: int
    sqnr_db: float
    expected_db: float


def layers(artifact: Artifact, feeds: Sequence[Feeds], profile: str = "cpu") -> list[LayerSqnr]:
    """The layers of ``profile``, in the order of the source's graph: every node whose result both graphs have.

    The cuda profile is emulated on the CPU. A node whose result went into a fused operator, or whose result is not
    fp32, is not among them. Raises :class:`ArtifactError` when the artifact has no such ONNX profile or no reference,
    :class:`~bf16kit.errors.RuntimeFailure` when a graph does not run.
    """
    return trace(artifact, feeds, profile).layers()


@dataclass(frozen=True, slots=True)
class Trace:
    """What ran through the reference and a profile on the same feeds."""

    graph: ir.Graph
    rounded: Rounded
    powers: dict[str, Power]
    expected: dict[ir.Value, float]

    def layers(self) -> list[LayerSqnr]:
        depths = expectation.depth(self.graph)
        return [
            LayerSqnr(
                name=node.name or "",
                op=label(node),
                weight=_weight(node),
                depth=depths[node.outputs[0]],
                sqnr_db=decibels(power.ratio),
                expected_db=decibels(self.expected[node.outputs[0]]),
            )
            for node in self.graph
            if (power := self.powers.get(node.outputs[0].name or "")) is not None
        ]


def trace(artifact: Artifact, feeds: Sequence[Feeds], profile: str) -> Trace:
    """Run ``profile`` and the reference on ``feeds``, and compare all values that both have. Errors: :func:`layers`."""
    manifest = artifact.manifest
    entry = manifest.profiles.get(profile)
    if entry is None or entry.format != "onnx":
        known = ", ".join(sorted(name for name, p in manifest.profiles.items() if p.format == "onnx")) or "none"
        raise ArtifactError(f"{artifact.path}: has no ONNX profile {profile!r} to look into; it has {known}")
    if manifest.reference is None:
        raise ArtifactError(
            f"{artifact.path}: was converted with --no-residual and keeps no fp32 reference to compare with;"
            " convert the checkpoint again with the residual"
        )
    path = artifact.file(manifest.reference)
    rebuilt = {name: artifact.restore(name) for name in initializers(path, REBUILT)}
    reference = Graph(ir.load(path), artifact.path, rebuilt)
    powers = compare(reference, Graph(_profile_graph(artifact, profile), artifact.path, {}), feeds)
    rounded = Rounded(
        narrowed(manifest.plan.tensors),
        frozenset(e.name for e in manifest.plan.nodes.get(profile, []) if e.precision == "bf16"),
    )
    graph = reference.model.graph
    means = _Means(artifact, powers)
    return Trace(graph, rounded, powers, expectation.expected(graph, rounded, means.of))


def decibels(ratio: float) -> float:
    """Noise ÷ signal as an SQNR in dB, within ±:data:`MOST`."""
    if ratio == 0:
        return MOST
    return max(-MOST, min(MOST, -10 * math.log10(ratio))) if math.isfinite(ratio) else -MOST


def _profile_graph(artifact: Artifact, profile: str) -> ir.Model:
    path = artifact.file(artifact.manifest.profiles[profile].graph)
    if profile == "cpu":
        return ir.load(path)
    return ir.serde.deserialize_model(onnx.load_from_string(emulation(path)))


def _weight(node: ir.Node) -> str:
    names = (value.name for value in node.inputs if value is not None and value.is_initializer() and value.shape)
    return next((name for name in names if name), "")


class _Means:
    """The mean square of each value: of computed ones as measured, of weights as they are stored."""

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
