"""Opens what a conversion wrote: in the runtime that will serve it, or emulating a device that is missing here.

The emulation of the cuda profile on a CPU computes every bf16 node in fp32 and rounds its result to bf16. CUDA's bf16
kernels multiply exactly, accumulate in fp32 and round once at the end. The emulation does the same, except for the
order of the sums. It rounds by a Cast to bf16 and a Cast back. ONNX Runtime keeps such pairs with all optimisations on,
because the second Cast does not restore the first one's input (observed on 1.31.1, and checked by a test).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import Manifest
from bf16kit.artifact.weightfile import WeightWriter
from bf16kit.converter.fuse.fuse import PUT_TOGETHER
from bf16kit.converter.graph.equality import in_fp32
from bf16kit.converter.graph.initializers import dims, stays_inline
from bf16kit.converter.graph.names import FreshNames, all_value_names
from bf16kit.converter.graph.operators import EXACT
from bf16kit.converter.graph.types import run
from bf16kit.converter.plan import is_matrix
from bf16kit.converter.plan.profiles import PROFILES
from bf16kit.converter.rewrite import Match
from bf16kit.converter.source import Array
from bf16kit.converter.write.export import read
from bf16kit.converter.write.graphs import serialize
from bf16kit.messages.errors import DeviceUnavailable
from bf16kit.numerics.rounding import BF16, to_bf16
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import CPU, Runtime
from bf16kit.runtime.loading import load
from bf16kit.runtime.memory.scratch import on_disk
from bf16kit.runtime.ort.onnxgraph import REBUILT

if TYPE_CHECKING:
    from bf16kit.runtime.ort.onnx import OnnxRuntime

FLOAT, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16
ReadWeight = Callable[[str, ir.TensorProtocol], Array]

_WEIGHTS = "fp32.weights"
_NOTE = "when verified: its tensors, converted to fp32, in the fp32 reference"
_REARRANGED = _NOTE + "; weights that the reference holds in another order were rounded as well"
_SUFFIX = ".safetensors"


def signature(manifest: Manifest) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the manifest's inputs and outputs."""
    return tuple(entry.spec() for entry in manifest.inputs), tuple(entry.spec() for entry in manifest.outputs)


def open_profile(artifact: Artifact, profile: str) -> tuple[Runtime, bool]:
    """Load ``profile`` of ``artifact`` as a server would; also return whether it is emulated.

    A profile for a device runs on the first such device; if there is none, it is emulated on the CPU.
    """
    device = PROFILES[profile].device if profile in PROFILES else CPU
    try:
        return load(artifact, profile, device=device), False
    except DeviceUnavailable:
        from bf16kit.runtime.ort.onnx import OnnxRuntime

        runtime = OnnxRuntime(
            emulation(artifact.file(artifact.manifest.profiles[profile].graph)),
            *signature(artifact.manifest),
            profile=profile,
            precision="fp32",
            base_dir=artifact.path,
            note="emulated on the CPU: every bf16 node computed in fp32, its result rounded",
        )
        return runtime, True


def open_traced(artifact: Artifact, profile: str, *, native_bf16: bool) -> Runtime:
    """Open a profile that torch runs, on the CPU: in bf16 or, as on CPUs without bf16 instructions, in fp32."""
    from bf16kit.runtime.torchruntimes import TorchExportRuntime, TorchScriptRuntime

    entry = artifact.manifest.profiles[profile]
    runtime = TorchExportRuntime if entry.format == "pt2" else TorchScriptRuntime
    return runtime(artifact.file(entry.graph), *signature(artifact.manifest), native_bf16=native_bf16)


def open_fp32_graph(
    model: ir.Model,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    scratch: Path | None = None,
    read: ReadWeight = lambda _name, tensor: tensor.numpy(),
    *,
    arena: bool = False,
) -> OnnxRuntime:
    """Open one of a conversion's fp32 graphs to be run: the source's, or the one that profiles start from.

    ``read`` returns each weight by name; ``model`` keeps its own. They are written to a file in ``scratch``, or where
    ``on_disk`` says, mapped and deleted: as arrays they would be in memory twice. ``arena`` is for many equal runs.
    """
    from bf16kit.runtime.ort.onnx import OnnxRuntime

    with (
        tempfile.TemporaryDirectory(dir=on_disk(scratch)) as directory,
        WeightWriter(Path(directory) / _WEIGHTS) as file,
    ):

        def place(name: str, tensor: ir.TensorProtocol) -> tuple[str, int, int]:
            segment = file.append(read(name, tensor))
            return _WEIGHTS, segment.offset, segment.bytes

        data = serialize(with_external_weights(model, place))
        file.close()
        return OnnxRuntime(
            data, inputs, outputs, profile="reference", precision="fp32", base_dir=Path(directory), arena=arena
        )


def with_external_weights(model: ir.Model, place: Callable[[str, ir.TensorProtocol], tuple[str, int, int]]) -> ir.Model:
    """Return a copy of ``model`` with weights as external data: ``place`` gives each one's file, offset and bytes."""
    slim = model.clone()
    for name, value in slim.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and not stays_inline(tensor):
            location, offset, length = place(name, tensor)
            shape = ir.Shape(dims(tensor))
            value.const_value = ir.ExternalTensor(location, offset, length, tensor.dtype, shape=shape, name=name)
    return slim


@dataclass(frozen=True, slots=True)
class GraphReference:
    """The fp32 graph for an artifact that keeps none, and which of its initializers holds which checkpoint tensor."""

    model: ir.Model
    matches: Mapping[str, Match]


def open_export(
    artifact: Artifact, name: str, source: GraphReference | None = None, scratch: Path | None = None
) -> tuple[Runtime, str]:
    """Open the reference with the tensors of the export ``name``; also return a note on how that was done.

    ``source`` replaces the reference of an artifact that keeps none. Some graphs do not hold each rounded tensor of the
    export as it is: ONNX orders an LSTM's gates differently. In such a graph, matrices that are no checkpoint tensor
    are rounded as well.
    """
    manifest = artifact.manifest
    holders: Mapping[str, tuple[str, Sequence[int] | None]]
    if source is None:
        model = ir.load(artifact.file(str(manifest.reference)))
        holders = {entry.name: (entry.tensor, entry.permutation) for entry in manifest.checkpoint}
    else:
        model = source.model
        holders = {tensor: (match.initializer, match.permutation) for tensor, match in source.matches.items()}
    tensors: dict[str, Array] = {}
    for file in manifest.exports[name].files:
        if file.endswith(_SUFFIX):  # read as any other program reads it
            tensors |= read(artifact.file(file))
    holders = {tensor: holder for tensor, holder in holders.items() if holder[0] in model.graph.initializers}
    places = {value: (tensor, order) for tensor, (value, order) in reversed(holders.items()) if tensor in tensors}
    rounds_others = any(
        array.dtype == BF16 and is_matrix(array.shape) and tensor not in holders for tensor, array in tensors.items()
    )

    def read_weight(value: str, tensor: ir.TensorProtocol) -> Array:
        if value in places:  # as the graph holds it: in its order of axes, and in fp32 if it computes in fp32
            exported, order = places[value]
            array = tensors[exported] if order is None else tensors[exported].transpose(np.argsort(order))
            return np.ascontiguousarray(in_fp32(array) if tensor.dtype == ir.DataType.FLOAT else array)
        rebuilt = isinstance(tensor, ir.ExternalTensor) and tensor.location == REBUILT
        array = artifact.restore(value) if rebuilt else tensor.numpy()
        rounds = rounds_others and array.dtype == np.float32 and is_matrix(array.shape)
        return in_fp32(to_bf16(array)) if rounds else array

    runtime = open_fp32_graph(model, *signature(manifest), scratch, read_weight)
    return runtime, _REARRANGED if rounds_others else _NOTE


def emulation(cuda_graph: Path) -> bytes:
    """Return the emulation of ``cuda_graph`` as an ONNX model; its weights are external data beside ``cuda_graph``.

    Raises :class:`ConversionError` if the graph holds bf16 where it cannot be emulated.
    """
    return serialize(run([emulate], ir.load(cuda_graph)))


def emulate(model: ir.Model) -> None:
    """Replace every bf16 value by an fp32 value that was rounded to bf16.

    Operators that only move or choose values need no rounding, because their inputs are bf16 values already. Nodes that
    put panels together still move bf16 weights, as in the cuda graph: widening first would double each copy. Ensures:
    only the graph's edges, initializers, values put together from them, and values between two casts are bf16. Only
    Shape may also read those.
    """
    graph, fresh = model.graph, FreshNames(all_value_names(model))
    for index, output in enumerate(graph.outputs):
        if output.dtype == BFLOAT16 and output.producer() is not None:  # as in the source; its node will give fp32
            cast = _cast(output, BFLOAT16, fresh)
            graph.append(cast)
            graph.outputs[index] = cast.outputs[0]
            output.name, cast.outputs[0].name = cast.outputs[0].name, output.name
    moves = _moves_of_weights(graph)
    others = [node for node in graph if node not in moves]
    given = [value for value in (*graph.inputs, *graph.initializers.values()) if value.dtype == BFLOAT16]
    given += [node.outputs[0] for node in moves]
    narrow = [(node, output) for node in others for output in node.outputs if output.dtype == BFLOAT16]
    for value in given if others else ():
        readers = [use for use in value.uses() if use.node not in moves and not _widens(use.node)]
        if readers:
            cast = _cast(value, FLOAT, fresh)
            graph.insert_before(others[0], cast)
            for use in readers:
                use.node.replace_input_with(use.idx, cast.outputs[0])
    for node, output in narrow:
        _emulate(graph, node, output, fresh)


def _moves_of_weights(graph: ir.Graph) -> dict[ir.Node, None]:
    """Return the leading nodes of ``graph`` that join its bf16 initializers (:mod:`bf16kit.converter.fuse.fuse`)."""
    moves, known = dict[ir.Node, None](), set[ir.Value | None](graph.initializers.values())
    for node in graph:
        if node.op_type not in PUT_TOGETHER or node.outputs[0].dtype != BFLOAT16 or not known.issuperset(node.inputs):
            break
        moves[node] = None
        known.update(node.outputs)
    return moves


def _emulate(graph: ir.Graph, node: ir.Node, output: ir.Value, fresh: FreshNames) -> None:
    """Make every node that reads ``output`` read its rounded fp32 value instead."""
    readers, last = tuple(output.uses()), node
    if node.op_type != "Cast":
        output.type = ir.TensorType(FLOAT)
        if node.op_type in EXACT:
            return
        last = _cast(output, BFLOAT16, fresh)
        graph.insert_after(node, last)
        output = last.outputs[0]
    back = _cast(output, FLOAT, fresh)
    graph.insert_after(last, back)
    for use in readers:
        use.node.replace_input_with(use.idx, back.outputs[0])


def _widens(node: ir.Node) -> bool:
    return node.op_type == "Cast" and node.outputs[0].dtype == FLOAT


def _cast(value: ir.Value, dtype: ir.DataType, fresh: FreshNames) -> ir.Node:
    name = fresh.make(f"{value.name}/{'rounded' if dtype == BFLOAT16 else 'emulated'}")
    node = ir.node("Cast", [value], attributes={"to": int(dtype)}, name=name)
    output = node.outputs[0]
    output.name, output.type, output.shape = name, ir.TensorType(dtype), value.shape
    return node
