"""Checking what the profiles start from: the prepared graph, still in fp32, answers as the source itself does.

Folding a BatchNorm, clamping masks, raising the opset and rewriting operators must not change a model. A fault of a few
parts in a thousand would be taken for bf16's own drift; here nothing is rounded yet: fp32 noise is all there may be.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from bf16kit.runtime.externaldata import REBUILT
from bf16kit.tensors import TensorSpec
from bf16kit.weightfile import WeightWriter
from converter.formats.onnx import serialize
from converter.graph.initializers import dims, stays_inline
from converter.model import Array, Feeds
from converter.passes import Prepared
from converter.proof.nudge import nudge
from converter.proof.oracle import Asked, certify
from converter.proof.spool import Spool

if TYPE_CHECKING:
    from bf16kit.runtime.onnx import OnnxRuntime

_WEIGHTS = "prepared.weights"


def check_prepared(
    asked: Asked,
    prepared: Prepared,
    model: ir.Model,
    edges: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    feeds: Sequence[Feeds],
    scratch: Path,
) -> None:
    """Run ``model``, one of ``prepared``'s, in fp32 and compare it with what the source itself answered.

    Nothing is run when preparing changed nothing, or when the source could not be asked. Its weights lie in a file in
    ``scratch`` meanwhile. Raises :class:`~bf16kit.errors.ConversionError` when more than fp32 noise is between them.
    """
    if not asked.answers or not _changed(prepared, model):
        return
    runtime = _open(model, edges, scratch)
    found = Spool(scratch)
    for feed in feeds[: len(asked.answers)]:
        found.append(runtime.run(feed))
    runtime.close()

    def nudged(random: np.random.Generator) -> OnnxRuntime:
        return _open(model, edges, scratch, lambda array: nudge(array, random, asked.roundoff))

    certify(asked, feeds, found, nudged, scratch, what="the prepared graph, before anything is rounded,")


def _changed(prepared: Prepared, model: ir.Model) -> bool:
    return bool(prepared.folds or prepared.clamped) or _structure(model) != _structure(prepared.reference)


def _structure(model: ir.Model) -> bytes:
    return serialize(_placed(model, lambda _name, tensor: (REBUILT, 0, tensor.nbytes)))


def _open(
    model: ir.Model,
    edges: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    scratch: Path,
    change: Callable[[Array], Array] | None = None,
) -> OnnxRuntime:
    """``model`` with its weights, each ``change``d, in a file that is mapped and gone from its directory."""
    from bf16kit.runtime.onnx import OnnxRuntime

    with tempfile.TemporaryDirectory(dir=scratch) as directory, WeightWriter(Path(directory) / _WEIGHTS) as file:

        def place(_name: str, tensor: ir.TensorProtocol) -> tuple[str, int, int]:
            array = tensor.numpy()
            segment = file.append(array if change is None else change(array))
            return _WEIGHTS, segment.offset, segment.bytes

        placed = serialize(_placed(model, place))
        file.close()
        return OnnxRuntime(placed, *edges, profile="reference", precision="fp32", base_dir=Path(directory))


def _placed(model: ir.Model, place: Callable[[str, ir.TensorProtocol], tuple[str, int, int]]) -> ir.Model:
    """A copy of ``model`` whose weights are external data: file, offset and bytes as ``place`` says."""
    slim = model.clone()
    for name, value in slim.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and not stays_inline(tensor):
            location, offset, length = place(name, tensor)
            shape = ir.Shape(dims(tensor))
            value.const_value = ir.ExternalTensor(location, offset, length, tensor.dtype, shape=shape, name=name)
    return slim
