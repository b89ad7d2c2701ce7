"""An artifact whose weights are those of its export: what the reference reads there, and what is elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper
from onnx_ir import serde

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import ExportEntry, Manifest, Plan, Source, SpecEntry
from bf16kit.artifact.publish import staging
from bf16kit.numerics.rounding import to_bf16
from bf16kit.numerics.tensors import Array
from bf16kit.runtime.loading import load_reference
from converter.plan import make_plan
from converter.plan.decisions import Overrides
from converter.rewrite import prepare
from converter.verify.running import NOTE, open_export
from converter.write.borrowedweights import unfolded, write_as_export
from converter.write.export import read
from converter.write.graphs import write_graphs
from converter.write.roundweights import Rounding

W, V = graphs.values(16, 32), graphs.values(32, 32)
BIAS, KERNEL = graphs.values(32), graphs.values(8, 4, 3, 3)
#: A linear layer as torch stores it, a convolution's kernel as JAX does, a square matrix both as the graph has it and
#: transposed, and a tensor that no graph reads.
CHECKPOINT: dict[str, Array] = {
    "w": np.ascontiguousarray(W.T),
    "v.transposed": np.ascontiguousarray(V.T),
    "v": V,
    "bias": BIAS,
    "kernel": np.ascontiguousarray(KERNEL.transpose(2, 3, 1, 0)),
    "unused": graphs.values(24, 24) + np.float32(1),
}


def _answer(x: Array, w: Array, v: Array, kernel: Array) -> Array:
    answer: Array = (x @ w + BIAS) @ v @ kernel.reshape(32, 9)
    return answer


@dataclass(frozen=True)
class Made:
    artifact: Artifact
    plan: Plan


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    proto = graphs.model(
        [
            helper.make_node("MatMul", ["x", "a"], ["h"]),
            helper.make_node("Add", ["h", "b"], ["s"]),
            helper.make_node("MatMul", ["s", "c"], ["t"]),
            helper.make_node("Reshape", ["k", "flat"], ["m"]),
            helper.make_node("MatMul", ["t", "m"], ["y"]),
        ],
        [graphs.edge("x", ["batch", 16])],
        [graphs.edge("y", ["batch", 9])],
        [
            graphs.initializer("a", W),
            graphs.initializer("b", BIAS),
            graphs.initializer("c", V),
            graphs.initializer("k", KERNEL),
            numpy_helper.from_array(np.array([32, 9]), "flat"),
        ],
    )
    prepared = unfolded(prepare(serde.deserialize_model(proto), CHECKPOINT), CHECKPOINT)
    planned = make_plan(prepared, profiles=())
    with staging(tmp_path / "m" / "1") as stage:
        stored, done, plan = write_as_export(
            prepared,
            planned.plan,
            Overrides(),
            CHECKPOINT,
            (),
            stage.path,
            stage.writer,
            Rounding("keep", saturate=False),
            residual=True,
            progress=lambda _: None,
        )
        write_graphs(prepared, planned, stored, stage.path, profiles=(), reference=True)
        artifact = stage.publish(
            Manifest(
                model="m",
                inputs=[SpecEntry(name="x", dtype="float32", shape=["batch", 16])],
                outputs=[SpecEntry(name="y", dtype="float32", shape=["batch", 9])],
                profiles={},
                exports={"safetensors": ExportEntry(files=done.files, precision="bf16-weights", verified="no")},
                reference="reference.onnx",
                tensors=list(stored.tensors.values()),
                checkpoint=list(stored.checkpoint),
                plan=plan,
                source=Source(format="test", sha256="", bytes=0, tensors=len(CHECKPOINT)),
            )
        )
        yield Made(artifact, plan)


def test_a_weight_that_the_graph_reads_transposed_is_stored_as_the_checkpoint_has_it(made: Made) -> None:
    found = read(made.artifact.file("model.safetensors"))
    assert list(found) == list(CHECKPOINT)
    for name, array in CHECKPOINT.items():
        expected = array if array.ndim == 1 else to_bf16(array)
        assert found[name].tobytes() == expected.tobytes(), name
    assert {entry.file for entry in made.artifact.manifest.tensors} == {"model.safetensors"}  # nothing is stored twice
    assert "weights.fp32" not in made.artifact.manifest.files


def test_the_reference_rebuilt_from_the_export_gives_the_source_s_outputs(made: Made) -> None:
    x = graphs.values(3, 16)
    runtime = load_reference(made.artifact)
    np.testing.assert_allclose(runtime.run({"x": x})["y"], _answer(x, W, V, KERNEL), rtol=1e-4, atol=1e-4)
    runtime.close()


def test_the_export_gives_the_outputs_of_its_own_tensors(made: Made) -> None:
    x = graphs.values(3, 16)
    w, v, kernel = (to_bf16(array).astype(np.float32) for array in (W, V, KERNEL))
    runtime, note = open_export(made.artifact, "safetensors")
    np.testing.assert_allclose(runtime.run({"x": x})["y"], _answer(x, w, v, kernel), rtol=1e-4, atol=1e-4)
    assert note != NOTE  # no graph reads the rounded ``unused``: the graph may hold it in another order
    runtime.close()


def test_every_tensor_of_the_checkpoint_is_restored_bit_for_bit(made: Made) -> None:
    restored = dict(made.artifact.checkpoint_tensors())
    assert restored.keys() == CHECKPOINT.keys()
    for name, array in CHECKPOINT.items():
        assert restored[name].tobytes() == array.tobytes(), name


def test_an_artifact_opened_with_copies_gives_the_same_outputs(made: Made) -> None:
    """Servers open artifacts like this: fp32 tensors of an export are rebuilt in memory, as the rounded ones are."""
    x = graphs.values(3, 16)
    runtime = load_reference(Artifact.open(made.artifact.path, copies=True))
    np.testing.assert_allclose(runtime.run({"x": x})["y"], _answer(x, W, V, KERNEL), rtol=1e-4, atol=1e-4)
    runtime.close()
