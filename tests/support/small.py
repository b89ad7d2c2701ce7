"""A small artifact with one tensor of every kind. Its graph is a few bytes that cannot run."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import CheckpointEntry, Manifest, ProfileEntry, Segment, Source, SpecEntry, TensorEntry
from bf16kit.artifact.publish import StagingArtifact, staging
from bf16kit.numerics.residual import Scale, encode_chunks
from bf16kit.numerics.rounding import to_bf16

CHECKPOINT: dict[str, NDArray[Any]] = {
    "linear.weight": np.random.default_rng(1).standard_normal((6, 10)).astype(np.float32),  # stored transposed
    "conv.weight": np.random.default_rng(2).standard_normal((4, 3, 2, 2)).astype(np.float32),  # a scale was folded in
    "linear.bias": np.random.default_rng(3).standard_normal(6).astype(np.float32),  # stays fp32
    "steps": np.array(7, np.int64),  # no graph uses it
}
SCALE = np.array([0.5, -3.0, 1.7, 1e-3], np.float32)


def entry_of(name: str, array: NDArray[Any], file: str, segment: Segment, **more: Any) -> TensorEntry:
    """Return the manifest's entry for ``array``, which was written to ``segment`` of ``file``."""
    place = {"file": file, "offset": segment.offset, "bytes": segment.bytes, **more}
    return TensorEntry(name=name, dtype=array.dtype.name, shape=list(array.shape), **place)


def write_small(staged: StagingArtifact, *, residual: bool = True) -> Manifest:
    """Write the files of the small artifact. Return its manifest without ``files``, which ``publish`` fills in."""
    linear = np.ascontiguousarray(CHECKPOINT["linear.weight"].T)
    conv = CHECKPOINT["conv.weight"]
    linear_bf16 = to_bf16(linear)
    conv_bf16 = to_bf16((conv.astype(np.float64) * SCALE[:, None, None, None]).astype(np.float32))
    with (
        staged.writer("weights.bf16") as bf16,
        staged.writer("weights.fp32") as fp32,
        staged.writer("residual.bin") as rest,
    ):
        low = rest.append_chunks(encode_chunks(linear, linear_bf16))
        low_scaled = rest.append_chunks(encode_chunks(conv, conv_bf16, Scale(0, SCALE)))
        plain, scaled = ({"residual": each if residual else None} for each in (low, low_scaled))
        tensors = [
            entry_of("w", linear_bf16, "weights.bf16", bf16.append(linear_bf16), **plain),
            entry_of("c", conv_bf16, "weights.bf16", bf16.append(conv_bf16), scale="c.scale", scale_axis=0, **scaled),
            entry_of("c.scale", SCALE, "weights.fp32", fp32.append(SCALE)),
            entry_of("b", CHECKPOINT["linear.bias"], "weights.fp32", fp32.append(CHECKPOINT["linear.bias"])),
            entry_of("steps", CHECKPOINT["steps"], "residual.bin", rest.append(CHECKPOINT["steps"])),
        ]
    (staged.path / "cpu.onnx").write_bytes(b"a graph")
    save_file(
        {"input:x": np.ones((2, 10), np.float32), "output:y": np.zeros((2, 6), np.float32)},
        staged.path / "golden.safetensors",
    )
    return Manifest(
        model="small",
        inputs=[SpecEntry(name="x", dtype="float32", shape=["batch", 10])],
        outputs=[SpecEntry(name="y", dtype="float32", shape=["batch", 6], kind="logits")],
        batch_axis=0,
        profiles={"cpu": ProfileEntry(format="onnx", graph="cpu.onnx", precision="bf16-weights", verified="no")},
        golden="golden.safetensors",
        tensors=tensors,
        checkpoint=[
            _source("linear.weight", "w", [1, 0]),
            _source("conv.weight", "c"),
            _source("linear.bias", "b"),
            _source("steps", "steps"),
        ],
        source=Source(format="test", sha256="", bytes=0, tensors=len(CHECKPOINT)),
    )


def _source(name: str, tensor: str, permutation: list[int] | None = None) -> CheckpointEntry:
    dtype, shape = CHECKPOINT[name].dtype.name, list(CHECKPOINT[name].shape)
    return CheckpointEntry(name=name, dtype=dtype, shape=shape, tensor=tensor, permutation=permutation)


def publish_small(target: Path, *, force: bool = False, residual: bool = True) -> Artifact:
    """Publish the small artifact at ``target``."""
    with staging(target, force=force) as staged:
        return staged.publish(write_small(staged, residual=residual))
