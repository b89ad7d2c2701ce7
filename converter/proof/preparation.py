"""Checking what the profiles start from: the prepared graph, still in fp32, answers as the source itself does.

Folding a BatchNorm, clamping masks, raising the opset and rewriting operators must not change a model. A fault of a few
parts in a thousand would be taken for bf16's own drift; here nothing is rounded yet: fp32 noise is all there may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from bf16kit.runtime.externaldata import REBUILT
from bf16kit.tensors import TensorSpec
from converter.formats.onnx import serialize
from converter.model import Feeds
from converter.passes import Prepared
from converter.proof.nudge import nudge
from converter.proof.oracle import Asked, certify
from converter.proof.running import open_source, placed
from converter.proof.spool import Spool

if TYPE_CHECKING:
    from bf16kit.runtime.onnx import OnnxRuntime


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
    runtime = open_source(model, *edges, scratch)
    found = Spool(scratch)
    for feed in feeds[: len(asked.answers)]:
        found.append(runtime.run(feed))
    runtime.close()

    def nudged(random: np.random.Generator) -> OnnxRuntime:
        return open_source(model, *edges, scratch, lambda _name, tensor: nudge(tensor.numpy(), random, asked.roundoff))

    certify(asked, feeds, found, nudged, scratch, what="the prepared graph, before anything is rounded,")


def _changed(prepared: Prepared, model: ir.Model) -> bool:
    return bool(prepared.folds or prepared.clamped) or _structure(model) != _structure(prepared.reference)


def _structure(model: ir.Model) -> bytes:
    return serialize(placed(model, lambda _name, tensor: (REBUILT, 0, tensor.nbytes)))
