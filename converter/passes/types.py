"""Every value gets a dtype and, where it can be known, a shape: casts are placed by dtype."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from converter.passes.step import Step
from converter.storage import dims


class InferTypes(Step):
    """Run ONNX's shape inference over the model; weights are not serialised for it.

    What stays unknown (outputs of operators outside ONNX) is treated as "not fp32" by the plan and left alone.
    """

    name = "infer types"

    def apply(self, model: ir.Model) -> bool:
        for value in model.graph.initializers.values():
            if value.const_value is not None:
                value.type = value.type or ir.TensorType(value.const_value.dtype)
                value.shape = value.shape or ir.Shape(dims(value.const_value))
        return ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model).modified
