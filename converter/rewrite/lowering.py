"""Gives operators bf16 kernels: raises the opset (Conv has a bf16 form only from 22 on), and rewrites some for CUDA."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir

from bf16kit.converter.graph.cuda_kernels import KernelTable
from bf16kit.converter.graph.initializers import const, initializer
from bf16kit.converter.graph.names import FreshNames, all_value_names, replace_output
from bf16kit.converter.graph.operators import bf16_form, label, since_version
from bf16kit.converter.graph.types import infer_types, run
from bf16kit.converter.process.quiet import quiet
from bf16kit.converter.rewrite.explicit import constants_to_initializers, hoist_initializers, name_everything
from bf16kit.messages.errors import ConversionError

TARGET = 22
OLDEST_WITH_BF16 = 13  # Cast and Gather support bf16 from here on
_NEWEST_IR = 11
_OLDEST_IR = 8
_RESIZE_STATES_COORDINATES = 11  # from here on, Resize has attributes for what was fixed before
_AXES_ARE_INPUTS = 18  # from this opset on, the axes of ReduceMean are an input

# Operators that lower_for_cuda rewrites, and their replacement: the replacement's bf16 form counts.
_REWRITTEN = {"GlobalAveragePool": "ReduceMean", "Clip": "Min"}


@cache
def kernel_table() -> KernelTable:
    """Return the table of the installed ONNX Runtime."""
    return KernelTable.load()


def check_opset(model: ir.Model) -> None:
    """Reject models that ONNX Runtime cannot load in any case, and set the IR version."""
    if "ai.onnx" in model.opset_imports:
        model.opset_imports[""] = model.opset_imports.pop("ai.onnx")
    opset, kernels = model.opset_imports.get(""), kernel_table()
    if opset is None:
        raise ConversionError(
            "the model imports no ONNX opset, so all its operators are custom; export it with ONNX operators"
        )
    if opset > kernels.accepted_opset:
        raise ConversionError(
            f"opset {opset} is newer than {kernels.accepted_opset}, the newest that ONNX Runtime"
            f" {kernels.onnxruntime} loads; export the model with opset {TARGET}"
        )
    newest = _NEWEST_IR if opset <= 23 else kernels.accepted_ir
    model.ir_version = min(max(model.ir_version, _OLDEST_IR), newest)


def raise_opset(model: ir.Model) -> None:
    """Convert the model to opset 22 if that gives it further bf16 kernels, or bf16 at all.

    Other models stay as their exporter wrote them. Requires: weights are initializers of the main graph. Ensures: the
    opset supports bf16 and has all operators.
    """
    opset = model.opset_imports[""]
    if opset < OLDEST_WITH_BF16 or (opset < TARGET and any(_gained(node, opset) for node in model.graph)):
        _raise(model, opset)
        opset = model.opset_imports[""]
    if opset < OLDEST_WITH_BF16:
        raise ConversionError(f"opset {opset} could not be raised; export the model with opset {OLDEST_WITH_BF16}+")
    for node in model.graph.all_nodes():
        if node.domain == "" and since_version(node, opset) is None:
            raise ConversionError(f"node {node.name!r}: operator {label(node)} does not exist in opset {opset}")


def _raise(model: ir.Model, opset: int) -> None:
    from onnxscript import version_converter  # slow to import, and rarely needed

    with quiet():  # it warns if it falls back on onnx's converter, for opsets before 18
        version_converter.convert_version(model, TARGET, fallback=True)
    if opset < _RESIZE_STATES_COORDINATES:
        _state_coordinates(model)
    model.ir_version = max(model.ir_version, 10)
    run([name_everything, constants_to_initializers, hoist_initializers, infer_types], model)


def _gained(node: ir.Node, opset: int) -> bool:
    probe = ir.node(_REWRITTEN[node.op_type], [None]) if node.op_type in _REWRITTEN else node
    return node.domain == "" and not _runs(probe, opset) and _runs(probe, TARGET)


def _runs(node: ir.Node, opset: int) -> bool:
    return _has_kernel(node, opset) and bf16_form(node, opset) is not None


def _has_kernel(node: ir.Node, opset: int) -> bool:
    since = since_version(node, opset)
    return since is not None and kernel_table().has_bf16_kernel(node.domain, node.op_type, since)


def _state_coordinates(model: ir.Model) -> None:
    """Give every Resize the meaning that Upsample and Resize had before opset 11, which onnx's converter leaves out.

    Coordinates were asymmetric. The nearest pixel was the one below, or, as ONNX Runtime computes it, the one above if
    the image shrinks. A Resize that enlarges one axis and shrinks another has no equivalent today, nor has one of
    unknown scales that shrinks: the check of the prepared graph refuses it.
    """
    for node in model.graph.all_nodes():
        if node.domain == "" and node.op_type == "Resize":
            scales = const(node.inputs[2])
            shrinks = scales is not None and bool((scales.numpy() <= 1).all())
            node.attributes.add(ir.AttrString("coordinate_transformation_mode", "asymmetric"))
            node.attributes.add(ir.AttrString("nearest_mode", "ceil" if shrinks else "floor"))


def lower_for_cuda(model: ir.Model) -> None:
    """Rewrite ``Clip(x, lo, hi)`` as ``Min(Max(x, lo), hi)``, and GlobalAveragePool as ReduceMean, which accumulates in
    fp32; both on fp32, if the table has no bf16 kernel for them.

    Requires: types are known; opset 11 or newer, where the bounds of Clip are inputs. A node stays if it is a Clip
    without bounds, or a GlobalAveragePool of unknown rank or of an opset older than 18.
    """
    opset, fresh = model.opset_imports[""], FreshNames(all_value_names(model))
    for node in tuple(model.graph):
        lowered = None
        if node.domain != "" or _has_kernel(node, opset):
            continue
        if node.op_type == "Clip" and node.outputs[0].dtype == ir.DataType.FLOAT:
            lowered = _clip(node, fresh)
        elif node.op_type == "GlobalAveragePool" and opset >= _AXES_ARE_INPUTS:
            lowered = _mean(model.graph, node, fresh)
        if lowered is not None:
            replace_output(node, lowered)


def _clip(node: ir.Node, fresh: FreshNames) -> ir.Value | None:
    """Insert the nodes that replace ``node`` and return their output; None if it has no bounds."""
    current, bounded = node.inputs[0], None
    for op, bound in zip(("Max", "Min"), node.inputs[1:], strict=False):
        if bound is not None:
            name = f"{node.name}/{op.lower()}"
            current = bounded = _insert(node, ir.node(op, [current, bound], name=name))
            bounded.name = fresh.make(name)
    return bounded


def _mean(graph: ir.Graph, node: ir.Node, fresh: FreshNames) -> ir.Value | None:
    """Insert the node that replaces ``node`` and return its output; None if it is not fp32 or of unknown rank."""
    source = node.inputs[0]
    if source is None or source.dtype != ir.DataType.FLOAT or source.shape is None:
        return None
    spatial = ir.tensor(np.arange(2, len(source.shape), dtype=np.int64))
    axes = initializer(graph, fresh.make(f"{node.name}/axes"), spatial)
    return _insert(node, ir.node("ReduceMean", [source, axes], attributes={"keepdims": 1}, name=f"{node.name}/mean"))


def _insert(replaced: ir.Node, added: ir.Node) -> ir.Value:
    """Insert ``added`` before the node that it replaces, with the type and shape of its output; return its output."""
    output, old = added.outputs[0], replaced.outputs[0]
    output.type, output.shape = old.type, old.shape
    if replaced.graph is not None:
        replaced.graph.insert_before(replaced, added)
    return output
