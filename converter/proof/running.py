"""Opening what a conversion wrote, with the runtime that will serve it, or emulating a device that is not here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import onnx_ir as ir

from bf16kit.artifact import Artifact
from bf16kit.errors import DeviceUnavailable
from bf16kit.runtime import Runtime
from bf16kit.runtime.device import CPU
from bf16kit.runtime.externaldata import REBUILT
from bf16kit.runtime.loading import load
from bf16kit.tensors import TensorSpec
from converter.formats.onnx import serialize
from converter.graph.initializers import dims, stays_inline
from converter.model import Array
from converter.plan.profiles import PROFILES
from converter.proof.emulate import emulation

if TYPE_CHECKING:
    from bf16kit.runtime.onnx import OnnxRuntime


def open_profile(artifact: Artifact, profile: str) -> tuple[Runtime, bool]:
    """``profile`` of ``artifact``, loaded as a server would, and whether that is an emulation.

    A profile for a device runs on the first one there is; where there is none, an emulation on the CPU stands in.
    """
    device = PROFILES[profile].device if profile in PROFILES else CPU
    if device == CPU:
        return load(artifact, profile), False
    try:
        return load(artifact, profile, device=device), False
    except DeviceUnavailable:
        return _emulated(artifact, profile), True


def open_torchscript(artifact: Artifact, *, native_bf16: bool) -> Runtime:
    """The TorchScript profile on the CPU, computing in bf16 or, as CPUs without such instructions do, in fp32."""
    from bf16kit.runtime.torchscript import TorchScriptRuntime

    manifest = artifact.manifest
    return TorchScriptRuntime(
        artifact.file(manifest.profiles["torchscript"].graph),
        [entry.spec() for entry in manifest.inputs],
        [entry.spec() for entry in manifest.outputs],
        native_bf16=native_bf16,
    )


def _emulated(artifact: Artifact, profile: str) -> OnnxRuntime:
    from bf16kit.runtime.onnx import OnnxRuntime

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


def open_source(
    model: ir.Model,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    change: Callable[[Array], Array] | None = None,
) -> OnnxRuntime:
    """The fp32 graph that a conversion started from: the reference of an artifact that keeps no residual.

    ``change`` is applied to each of its weights; the graph keeps its own.
    """
    from bf16kit.runtime.onnx import OnnxRuntime

    slim = model.clone()
    weights: Mapping[str, Array] = {
        name: value.const_value.numpy() if change is None else change(value.const_value.numpy())
        for name, value in slim.graph.initializers.items()
        if value.const_value is not None and not stays_inline(value.const_value)
    }
    for name in weights:
        value = slim.graph.initializers[name]
        tensor = value.const_value
        assert tensor is not None  # noqa: S101 - it has weights
        shape = ir.Shape(dims(tensor))
        value.const_value = ir.ExternalTensor(REBUILT, 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)
    return OnnxRuntime(serialize(slim), inputs, outputs, profile="reference", precision="fp32", external=weights)
