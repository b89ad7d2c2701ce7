"""Rewrites GlobalAveragePool, without a bf16 kernel on CUDA, as ReduceMean, which accumulates in fp32."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from converter.graph.initializers import initializer
from converter.graph.names import FreshNames
from converter.graph.operators import since_version
from converter.rewrite.rewriting import Rewrite, replace_output

_AXES_ARE_INPUTS = 18


class GlobalAverageToReduceMean(Rewrite):
    """Rewrite ``GlobalAveragePool(x)`` on fp32 as ``ReduceMean(x)`` over the spatial axes, which are kept with size 1.

    Requires: types are known. The node stays if the rank of x is not known or the opset is older than 18.
    """

    name = "rewrite GlobalAveragePool as ReduceMean"

    def rewritable(self, node: ir.Node, opset: int) -> bool:
        if node.op_type != "GlobalAveragePool" or node.domain != "" or opset < _AXES_ARE_INPUTS:
            return False
        source = node.inputs[0]
        if source is None or source.dtype != ir.DataType.FLOAT or source.shape is None:
            return False
        return not self.kernels.has_bf16_kernel("", "GlobalAveragePool", since_version(node, opset) or 0)

    def rewrite(self, graph: ir.Graph, node: ir.Node, fresh: FreshNames) -> None:
        source, output = node.inputs[0], node.outputs[0]
        if source is None or source.shape is None:
            return
        spatial = ir.tensor(np.arange(2, len(source.shape), dtype=np.int64))
        axes = initializer(graph, fresh.make(f"{node.name}/axes"), spatial)
        mean = ir.node("ReduceMean", [source, axes], attributes={"keepdims": 1}, name=f"{node.name}/mean")
        graph.insert_before(node, mean)
        mean.outputs[0].type, mean.outputs[0].shape = output.type, output.shape
        replace_output(graph, node, mean.outputs[0])
