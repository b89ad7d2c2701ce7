"""Artifacts with correct digests whose loading never ends, or takes hours: each in another step."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from artifacts import write_mlp
from onnx import helper, numpy_helper

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import ProfileEntry
from bf16kit.artifact.reading import Digests

_WIDTH = 2500  # of a product that takes about half a second
_PRODUCTS = 100_000


def write_folding(target: Path) -> Artifact:
    """Publish an MLP with a chain of products of constants, which ONNX Runtime computes when it opens a session."""
    artifact = write_mlp(target)
    model = onnx.load(target / "cpu.onnx", load_external_data=False)
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(np.array([[1e-4]], np.float32), "one"),
            numpy_helper.from_array(np.array([_WIDTH, _WIDTH]), "sizes"),
            numpy_helper.from_array(np.array([0, 0]), "first"),
            numpy_helper.from_array(np.array([1, 1]), "second"),
        ]
    )
    products = [helper.make_node("MatMul", [f"m{i}", "m0"], [f"m{i + 1}"]) for i in range(_PRODUCTS)]
    folded = [
        helper.make_node("Expand", ["one", "sizes"], ["m0"]),
        *products,
        helper.make_node("Slice", [f"m{_PRODUCTS}", "first", "second"], ["corner"]),
    ]
    model.graph.node[-1].output[0] = "y_before"
    model.graph.node.extend([*folded, helper.make_node("Add", ["y_before", "corner"], ["y"])])
    (target / "cpu.onnx").write_bytes(model.SerializeToString())
    return _rewritten(artifact, "cpu.onnx")


class _Endless(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while bool((x * 0 == 0).all()):
            x = x * 1.0
        return x


def write_endless_script(target: Path) -> Artifact:
    """Publish a TorchScript module whose run never ends."""
    artifact = write_mlp(target)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        scripted: Any = torch.jit.script(_Endless())
    scripted.save(str(target / "model.torchscript.pt"))
    entry = ProfileEntry(format="torchscript", graph="model.torchscript.pt", precision="fp32", verified="host")
    return _rewritten(artifact, "model.torchscript.pt", profiles={"torchscript": entry})


def _rewritten(artifact: Artifact, file: str, **changes: object) -> Artifact:
    files = artifact.manifest.files | {file: Digests().entry(artifact.path / file)}
    manifest = artifact.manifest.model_copy(update={"files": files, **changes})
    (artifact.path / "manifest.json").write_bytes(manifest.dumps())
    return Artifact.open(artifact.path)
