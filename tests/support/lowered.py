"""Take a graph through the ONNX half of a conversion, and run the result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import ModelProto

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import Manifest, Plan, ProfileEntry, Source, SpecEntry
from bf16kit.artifact.publish import staging
from bf16kit.converter.plan import Planned, make_plan
from bf16kit.converter.read.sources import output_specs
from bf16kit.converter.rewrite import Prepared, prepare
from bf16kit.converter.rewrite.explicit import floating_tensors
from bf16kit.converter.verify.running import emulation
from bf16kit.converter.write.graphs import serialize, write_graphs
from bf16kit.converter.write.weights import Rounding, StoredWeights, write_weights
from bf16kit.numerics.rounding import Subnormals
from bf16kit.numerics.tensors import BY_ONNX, TensorSpec
from bf16kit.runtime.loading import load, load_reference
from bf16kit.runtime.ort.kernel import LIBRARY
from bf16kit.runtime.ort.onnx import OnnxRuntime
from bf16kit.runtime.ort.session import open_session

Array = NDArray[Any]
_PROFILES = {
    "cpu": ProfileEntry(format="onnx", graph="cpu.onnx", precision="bf16-weights", verified="host"),
    "cpu-bf16": ProfileEntry(format="onnx", graph="cpu-bf16.onnx", precision="bf16", verified="host"),
    "cuda": ProfileEntry(format="onnx", graph="cuda.onnx", precision="bf16", verified="emulated"),
}


def run_exported(graph: ir.Model, inputs: Sequence[TensorSpec], **feeds: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Run a graph as the converter reads it from a source."""
    return OnnxRuntime(serialize(graph), inputs, output_specs(graph), precision="fp32").run(feeds)


@dataclass(frozen=True)
class Lowered:
    """The results of a conversion, and its source."""

    source: bytes
    checkpoint: Mapping[str, Array]
    prepared: Prepared
    planned: Planned
    stored: StoredWeights
    artifact: Artifact
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def run_source(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return OnnxRuntime(self.source, self.inputs, self.outputs, precision="fp32").run(feeds)

    def run_reference(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return load_reference(self.artifact).run(feeds)

    def run_cpu(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return load(self.artifact, "cpu").run(feeds)

    def run_kernel(self, feeds: Mapping[str, Array], profile: str = "cpu") -> dict[str, Array]:
        """Return the kernel's outputs. First check that its library has every operator.

        ONNX Runtime would run the function definition of a missing operator instead.
        """
        if not LIBRARY.exists():
            pytest.skip("the kernel was not built: no C++17 compiler")
        path = self.artifact.file(f"{profile}.onnx")
        alone = onnx.load(path, load_external_data=False)
        del alone.functions[:]
        open_session(alone.SerializeToString(), base_dir=path.parent, library=LIBRARY)
        runtime = load(self.artifact, profile)
        assert runtime.info.kernel
        return runtime.run(feeds)

    def run_emulated(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        path = self.artifact.file("cuda.onnx")
        return OnnxRuntime(emulation(path), self.inputs, self.outputs, base_dir=path.parent).run(feeds)

    def graph(self, name: str) -> onnx.GraphProto:
        """Return the graph of ``name``.onnx, without its weights."""
        return onnx.load(self.artifact.file(f"{name}.onnx"), load_external_data=False).graph

    def ops(self, name: str) -> list[str]:
        return [node.op_type for node in self.graph(name).node]

    def precision(self, profile: str = "cuda") -> dict[str, str]:
        """Return the plan's precision by node name."""
        return {entry.name: entry.precision for entry in self.plan.nodes[profile]}

    def size(self, *files: str) -> int:
        return sum(self.artifact.file(name).stat().st_size for name in files)


def lower(
    target: Path,
    proto: ModelProto,
    *,
    checkpoint: Mapping[str, Array] | None = None,
    profiles: Sequence[str] = ("cpu", "cuda"),
    panels: Mapping[str, int] | None = None,
    residual: bool = True,
    subnormals: Subnormals = "keep",
    saturate: bool = False,
    **plan: Any,
) -> Lowered:
    """Convert ``proto`` to an artifact at ``target``. Its own tensors are the checkpoint, unless one is given.

    By default the conversion chooses the ``panels`` itself.
    """
    source = proto.SerializeToString()
    model = ir.from_proto(onnx.ModelProto.FromString(source))
    tensors = floating_tensors(model) if checkpoint is None else checkpoint
    inputs, outputs = specs(model.graph.inputs), specs(model.graph.outputs)
    prepared = prepare(model, tensors)
    planned = make_plan(prepared, profiles=profiles, panels=panels, **plan)
    made = planned.plan
    with staging(target) as staged:
        stored = write_weights(
            prepared,
            made,
            tensors,
            staged.writer,
            Rounding(subnormals, saturate),
            residual=residual,
            panels=planned.fusions.panels if panels is None else panels,
        )
        write_graphs(prepared, planned, stored, staged.path, profiles=profiles, reference=residual)
        manifest = Manifest(
            model="m",
            inputs=[SpecEntry.of(spec) for spec in inputs],
            outputs=[SpecEntry.of(spec) for spec in outputs],
            profiles={name: _PROFILES[name] for name in profiles},
            reference="reference.onnx" if residual else None,
            tensors=list(stored.tensors.values()),
            checkpoint=list(stored.checkpoint),
            plan=made,
            source=Source(
                format="onnx", sha256="", bytes=sum(a.nbytes for a in tensors.values()), tensors=len(tensors)
            ),
        )
        artifact = staged.publish(manifest)
    return Lowered(source, tensors, prepared, planned, stored, artifact, inputs, outputs)


def specs(values: Sequence[ir.Value]) -> tuple[TensorSpec, ...]:
    found = []
    for value in values:
        dims = () if value.shape is None else value.shape.dims
        shape = tuple(d if isinstance(d, int) else str(d.value or f"d{i}") for i, d in enumerate(dims))
        dtype = value.dtype
        assert dtype is not None
        assert value.name is not None
        found.append(TensorSpec(value.name, BY_ONNX[int(dtype)].name, shape))
    return tuple(found)


def relative_l2(reference: Array, candidate: Array) -> float:
    wide = reference.astype(np.float64)
    return float(np.linalg.norm(candidate.astype(np.float64) - wide) / np.linalg.norm(wide))


def assert_same_tensors(artifact: Artifact, checkpoint: Mapping[str, Array]) -> None:
    """Assert that the artifact returns every tensor of the checkpoint, bit for bit and in the same order."""
    restored = dict(artifact.checkpoint_tensors())
    assert list(restored) == list(checkpoint)
    for name, array in checkpoint.items():
        assert restored[name].dtype == array.dtype, name
        assert restored[name].shape == array.shape, name
        assert restored[name].tobytes() == np.ascontiguousarray(array).tobytes(), name
