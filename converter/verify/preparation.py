"""Checks the graph that the profiles start from: prepared, still in fp32, it must match the source's outputs.

Folding a BatchNorm, clamping masks, raising the opset and rewriting operators must not change a model. A fault of a few
parts in a thousand would be mistaken for bf16's own drift. At this point nothing is rounded, so only fp32 noise is
allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.ort.externaldata import REBUILT
from converter.rewrite import Prepared
from converter.source import Feeds
from converter.verify.oracle import OracleRun, certify
from converter.verify.running import open_fp32_graph, with_external_weights
from converter.verify.spool import Spool
from converter.write.graphs import serialize


def check_prepared(
    oracle_run: OracleRun,
    prepared: Prepared,
    model: ir.Model,
    edges: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    feeds: Sequence[Feeds],
    scratch: Path,
) -> None:
    """Run ``model``, one of the graphs of ``prepared``, in fp32 and compare it with the source's own outputs.

    Nothing is run if preparing changed nothing, or if the source has no outputs to compare with. The weights are kept
    in a file in ``scratch`` while it runs. Raises :class:`ConversionError` if the difference exceeds
    fp32 noise.
    """
    if not oracle_run.outputs or not _changed(prepared, model):
        return
    runtime = open_fp32_graph(model, *edges, scratch)
    found = Spool(scratch)
    for feed in feeds[: len(oracle_run.outputs)]:
        found.append(runtime.run(feed))
    runtime.close()
    certify(oracle_run, found, what="the prepared graph, before rounding,")


def _changed(prepared: Prepared, model: ir.Model) -> bool:
    return bool(prepared.folds or prepared.clamped) or _structure(model) != _structure(prepared.reference)


def _structure(model: ir.Model) -> bytes:
    return serialize(with_external_weights(model, lambda _name, tensor: (REBUILT, 0, tensor.nbytes)))
