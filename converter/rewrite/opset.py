"""Raises the opset for bf16: torch's exporter writes opset 20, but Conv has a bf16 form only from 22."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from bf16kit.messages.errors import ConversionError
from converter.graph.cuda_kernels import KernelTable
from converter.graph.initializers import const, stays_inline
from converter.graph.names import NameEverything
from converter.graph.operators import bf16_form, label, since_version
from converter.graph.step import Step, run
from converter.graph.types import InferTypes
from converter.rewrite.explicit import ConstantsToInitializers, HoistInitializers

TARGET = 22
OLDEST_WITH_BF16 = 13  # Cast and Gather support bf16 from here on
_NEWEST_IR = 11
_OLDEST_IR = 8
_RESIZE_STATES_COORDINATES = 11  # from here on, Resize has attributes for what was fixed before
_OLDEST_UP_CONVERTIBLE = 18  # onnxscript's converter, which works in place, starts here; older opsets use onnx's

# Operators that a later step rewrites, and their replacement: the replacement's bf16 form counts.
_REWRITTEN = {"GlobalAveragePool": "ReduceMean", "Clip": "Min"}


class SupportedOpset(Step):
    """Reject models that ONNX Runtime cannot load in any case, and set the IR version."""

    name = "check the opset"

    def __init__(self, kernels: KernelTable) -> None:
        super().__init__()
        self._kernels = kernels

    def requires(self, model: ir.Model) -> None:
        if "ai.onnx" in model.opset_imports:
            model.opset_imports[""] = model.opset_imports.pop("ai.onnx")
        opset = model.opset_imports.get("")
        if opset is None:
            raise ConversionError(
                "the model imports no ONNX opset, so all its operators are custom; export it with ONNX operators"
            )
        if opset > self._kernels.accepted_opset:
            raise ConversionError(
                f"opset {opset} is newer than {self._kernels.accepted_opset}, the newest that ONNX Runtime"
                f" {self._kernels.onnxruntime} loads; export the model with opset {TARGET}"
            )

    def apply(self, model: ir.Model) -> bool:
        newest = _NEWEST_IR if model.opset_imports[""] <= 23 else self._kernels.accepted_ir
        before = model.ir_version
        model.ir_version = min(max(before, _OLDEST_IR), newest)
        return model.ir_version != before


class RaiseOpset(Step):
    """Convert the model to opset 22 if that gives it further bf16 kernels, or bf16 at all.

    Other models stay as their exporter wrote them. Requires: weights are initializers of the main graph. Ensures: the
    opset supports bf16.
    """

    name = "raise the opset"

    def __init__(self, kernels: KernelTable) -> None:
        super().__init__()
        self._kernels = kernels

    def apply(self, model: ir.Model) -> bool:
        if not self._gains(model):
            return False
        before = model.opset_imports[""]
        if before >= _OLDEST_UP_CONVERTIBLE:
            from onnxscript import version_converter  # slow to import, and rarely needed

            version_converter.convert_version(model, TARGET)
        else:
            _convert_by_onnx(model)
        model.ir_version = max(model.ir_version, 10)
        return True

    def ensures(self, model: ir.Model) -> None:
        opset = model.opset_imports[""]
        if opset < OLDEST_WITH_BF16:
            raise ConversionError(f"opset {opset} could not be raised; export the model with opset {OLDEST_WITH_BF16}+")
        for node in model.graph.all_nodes():
            if node.domain == "" and since_version(node, opset) is None:
                raise ConversionError(f"node {node.name!r}: operator {label(node)} does not exist in opset {opset}")

    def _gains(self, model: ir.Model) -> bool:
        opset = model.opset_imports[""]
        if opset >= TARGET:
            return False
        return opset < OLDEST_WITH_BF16 or any(self._gained(node, opset) for node in model.graph)

    def _gained(self, node: ir.Node, opset: int) -> bool:
        probe = ir.node(_REWRITTEN[node.op_type], [None]) if node.op_type in _REWRITTEN else node
        return node.domain == "" and not self._runs(probe, opset) and self._runs(probe, TARGET)

    def _runs(self, node: ir.Node, opset: int) -> bool:
        since = since_version(node, opset)
        return (
            since is not None
            and self._kernels.has_bf16_kernel(node.domain, node.op_type, since)
            and bf16_form(node, opset) is not None
        )


def _convert_by_onnx(model: ir.Model) -> None:
    """Convert by onnx's C++ converter. It works on a serialised copy, so large weights are left out of it."""
    weights = {n: v for n, v in model.graph.initializers.items() if v.const_value and not stays_inline(v.const_value)}
    slim = model.clone()
    for name in weights:
        slim.graph.inputs.append(slim.graph.initializers.pop(name))
    converted = ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(slim), TARGET))
    for value in [v for v in converted.graph.inputs if v.name in weights]:
        converted.graph.inputs.remove(value)
        value.const_value = weights[value.name or ""].const_value
        converted.graph.register_initializer(value)
    if model.opset_imports[""] < _RESIZE_STATES_COORDINATES:
        _state_coordinates(converted)
    model.graph = converted.graph
    run([NameEverything(), ConstantsToInitializers(), HoistInitializers(), InferTypes()], model)


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
