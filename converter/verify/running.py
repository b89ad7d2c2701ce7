"""Opens what a conversion wrote: in the runtime that will serve it, or emulating a device that is missing here."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.weightfile import WeightWriter
from bf16kit.messages.errors import DeviceUnavailable
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Runtime
from bf16kit.runtime.device import CPU
from bf16kit.runtime.loading import load
from bf16kit.runtime.memory.scratch import on_disk
from converter.graph.initializers import dims, stays_inline
from converter.plan.profiles import PROFILES
from converter.source import Array
from converter.verify.emulate import emulation
from converter.write.graphs import serialize

if TYPE_CHECKING:
    from bf16kit.runtime.ort.onnx import OnnxRuntime

ReadWeight = Callable[[str, ir.TensorProtocol], Array]

_WEIGHTS = "fp32.weights"


def open_profile(artifact: Artifact, profile: str) -> tuple[Runtime, bool]:
    """Load ``profile`` of ``artifact`` as a server would; also return whether it is emulated.

    A profile for a device runs on the first such device; if there is none, it is emulated on the CPU.
    """
    device = PROFILES[profile].device if profile in PROFILES else CPU
    if device == CPU:
        return load(artifact, profile), False
    try:
        return load(artifact, profile, device=device), False
    except DeviceUnavailable:
        return _emulated(artifact, profile), True


def open_traced(artifact: Artifact, profile: str, *, native_bf16: bool) -> Runtime:
    """Open a profile that torch runs, on the CPU: in bf16 or, as on CPUs without bf16 instructions, in fp32."""
    from bf16kit.runtime.torchexport import TorchExportRuntime
    from bf16kit.runtime.torchscript import TorchScriptRuntime

    manifest = artifact.manifest
    entry = manifest.profiles[profile]
    runtime = TorchExportRuntime if entry.format == "pt2" else TorchScriptRuntime
    return runtime(
        artifact.file(entry.graph),
        [entry.spec() for entry in manifest.inputs],
        [entry.spec() for entry in manifest.outputs],
        native_bf16=native_bf16,
    )


def _emulated(artifact: Artifact, profile: str) -> OnnxRuntime:
    from bf16kit.runtime.ort.onnx import OnnxRuntime

    manifest = artifact.manifest
    graph = artifact.file(manifest.profiles[profile].graph)
    return OnnxRuntime(
        emulation(graph),
        [entry.spec() for entry in manifest.inputs],
        [entry.spec() for entry in manifest.outputs],
        profile=profile,
        precision="fp32",
        base_dir=artifact.path,
        note="emulated on the CPU: every bf16 node computed in fp32, its result rounded",
    )


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

    ``read`` returns each weight by name; ``model`` keeps its own. The weights are written to a file in ``scratch``, or
    where :func:`~scratch.on_disk` says. The file is mapped and deleted: passed as arrays, the weights
    would be in memory twice. ``arena`` is for many runs of the same shapes.
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
