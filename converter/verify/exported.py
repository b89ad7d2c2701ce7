"""Measures the accuracy of an export: its tensors, widened, replace the reference's own, in the same arithmetic.

A framework that loads the export may do more: one that computes in bf16 rounds activations as well. What is measured
here depends on the files alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from bf16kit.artifact.artifact import Artifact
from bf16kit.messages.errors import ArtifactError
from bf16kit.numerics.rounding import BF16, to_bf16
from bf16kit.runtime import Runtime
from bf16kit.runtime.ort.externaldata import REBUILT
from converter.graph.equality import in_fp32
from converter.plan import is_matrix
from converter.rewrite import Match
from converter.source import Array
from converter.verify.running import open_fp32_graph
from converter.write.safetensors import read

NOTE = "when verified: its tensors, converted to fp32, in the fp32 reference"
REARRANGED = NOTE + "; weights that the reference holds in another order were rounded as well"
_SUFFIX = ".safetensors"

_ReadInitializer = Callable[[str, ir.TensorProtocol], Array]


@dataclass(frozen=True, slots=True)
class GraphReference:
    """The fp32 graph for an artifact that keeps none, and which of its initializers holds which checkpoint tensor."""

    model: ir.Model
    matches: Mapping[str, Match]


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph in which tensors of an export replace initializers.

    ``holders`` maps a checkpoint tensor's name to the initializer that holds it, and the order of its axes there.
    ``read_initializer`` returns an initializer as the reference has it.
    """

    model: ir.Model
    holders: Mapping[str, tuple[str, Sequence[int] | None]]
    read_initializer: _ReadInitializer


def open_export(
    artifact: Artifact, name: str, source: GraphReference | None = None, scratch: Path | None = None
) -> tuple[Runtime, str]:
    """Open the reference with the tensors of the export ``name``; also return a note on how that was done.

    ``source`` replaces the reference of an artifact that keeps none. Some graphs do not hold each rounded tensor of the
    export as it is: ONNX orders an LSTM's gates differently. In such a graph, matrices that are no checkpoint tensor
    are rounded as well. Raises :class:`ArtifactError` without a reference.
    """
    tensors = tensors_of(artifact, name)
    graph = _graph_of_artifact(artifact) if source is None else _graph_of_source(source)
    present = {
        tensor: holder for tensor, holder in graph.holders.items() if holder[0] in graph.model.graph.initializers
    }
    rounds_others = any(
        array.dtype == BF16 and is_matrix(array.shape) and tensor not in present for tensor, array in tensors.items()
    )
    places = {value: (tensor, order) for tensor, (value, order) in reversed(present.items()) if tensor in tensors}

    def read_tensor(value: str, tensor: ir.TensorProtocol) -> Array:
        if value in places:
            exported, order = places[value]
            return _as_graph_holds(tensors[exported], order, tensor)
        array = graph.read_initializer(value, tensor)
        return (
            in_fp32(to_bf16(array)) if rounds_others and array.dtype == np.float32 and is_matrix(array.shape) else array
        )

    manifest = artifact.manifest
    inputs, outputs = ([entry.spec() for entry in edges] for edges in (manifest.inputs, manifest.outputs))
    return open_fp32_graph(graph.model, inputs, outputs, scratch, read_tensor), REARRANGED if rounds_others else NOTE


def tensors_of(artifact: Artifact, name: str) -> dict[str, Array]:
    """Return the tensors of the export ``name``, read from its files as any other program reads them."""
    found: dict[str, Array] = {}
    for file in artifact.manifest.exports[name].files:
        if file.endswith(_SUFFIX):
            found |= read(artifact.file(file))
    return found


def _graph_of_artifact(artifact: Artifact) -> _Graph:
    manifest = artifact.manifest
    if manifest.reference is None:
        raise ArtifactError(f"{artifact.path}: keeps no fp32 reference, so its export cannot be run")
    reader = Artifact(artifact.path, manifest, artifact.copies)

    def read_initializer(value: str, tensor: ir.TensorProtocol) -> Array:
        rebuilt = isinstance(tensor, ir.ExternalTensor) and tensor.location == REBUILT
        return reader.restore(value) if rebuilt else tensor.numpy()

    holders = {entry.name: (entry.tensor, entry.permutation) for entry in manifest.checkpoint}
    return _Graph(ir.load(artifact.file(manifest.reference)), holders, read_initializer)


def _graph_of_source(source: GraphReference) -> _Graph:
    holders = {name: (match.initializer, match.permutation) for name, match in source.matches.items()}
    return _Graph(source.model, holders, lambda _value, tensor: tensor.numpy())


def _as_graph_holds(array: Array, order: Sequence[int] | None, tensor: ir.TensorProtocol) -> Array:
    """Return an exported tensor as the graph holds it: in its order of axes, and in fp32 if it computes in fp32."""
    placed = array if order is None else array.transpose(np.argsort(order))
    return np.ascontiguousarray(in_fp32(placed) if tensor.dtype == ir.DataType.FLOAT else placed)
