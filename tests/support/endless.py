"""Artifacts with correct digests whose loading never ends, or takes hours: each in another step."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from artifacts import write_mlp

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import ProfileEntry
from bf16kit.artifact.reading import Digests

_WIDTH = 2500  # of a product that takes about half a second
_PRODUCTS = 100_000


def write_folding(target: Path) -> Artifact:
    """Publish an MLP with a chain of products of constants, which ONNX Runtime computes when it opens a session."""
    artifact = write_mlp(target)
    model = onnx.load(target / "cpu.onnx", load_external_data=False)
    constants = {"one": np.array([[1e-4]], np.float32), "sizes": np.array([_WIDTH, _WIDTH])}
    constants |= {"first": np.array([0, 0]), "second": np.array([1, 1])}
    model.graph.initializer.extend(graphs.initializer(*each) for each in constants.items())
    products = " ".join(f"m{i + 1} = MatMul (m{i}, m0)" for i in range(_PRODUCTS))
    model.graph.node[-1].output[0] = "y_before"
    model.graph.node.extend(
        graphs.nodes(
            f"""m0 = Expand (one, sizes) {products} corner = Slice (m{_PRODUCTS}, first, second)
            y = Add (y_before, corner)"""
        )
    )
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
    with warnings.catch_warnings(action="ignore"):
        scripted: Any = torch.jit.script(_Endless())
    scripted.save(str(target / "model.torchscript.pt"))
    entry = ProfileEntry(format="torchscript", graph="model.torchscript.pt", precision="fp32", verified="host")
    return _rewritten(artifact, "model.torchscript.pt", profiles={"torchscript": entry})


def _rewritten(artifact: Artifact, file: str, **changes: object) -> Artifact:
    files = artifact.manifest.files | {file: Digests().entry(artifact.path / file)}
    manifest = artifact.manifest.model_copy(update={"files": files, **changes})
    (artifact.path / "manifest.json").write_bytes(manifest.dumps())
    return Artifact.open(artifact.path)
