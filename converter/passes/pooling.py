"""GlobalAveragePool has no bf16 kernel on CUDA; ReduceMean has, and accumulates in fp32."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from converter.kernels import KernelTable
from converter.operators import since_version
from converter.passes.clip import replace_output
from converter.passes.names import FreshNames, all_value_names
from converter.passes.step import Step
from converter.storage import initializer

_AXES_ARE_INPUTS = 18


class GlobalAverageToReduceMean(Step):
    """Rewrite ``GlobalAveragePool(x)`` on fp32 as ``ReduceMean(x)`` over the spatial axes, which are kept as ones.

    Requires: types are known. Where the rank of x is not known, or the opset is older than 18, the node stays.
    """

    name = "rewrite GlobalAveragePool as ReduceMean"

    def __init__(self, kernels: KernelTable) -> None:
        super().__init__()
        self._kernels = kernels

    def apply(self, model: ir.Model) -> bool:
        opset = model.opset_imports[""]
        found = [node for node in model.graph if self._rewritable(node, opset)]
        fresh = FreshNames(all_value_names(model))
        for node in found:
            _rewrite(model.graph, node, fresh)
        return bool(found)

    def _rewritable(self, node: ir.Node, opset: int) -> bool:
        if node.op_type != "GlobalAveragePool" or node.domain != "" or opset < _AXES_ARE_INPUTS:
            return False
        source = node.inputs[0]
        if source is None or source.dtype != ir.DataType.FLOAT or source.shape is None:
            return False
        return not self._kernels.has("", "GlobalAveragePool", since_version(node, opset) or 0)


def _rewrite(graph: ir.Graph, pool: ir.Node, fresh: FreshNames) -> None:
    source, output = pool.inputs[0], pool.outputs[0]
    if source is None or source.shape is None:
        return
    spatial = ir.tensor(np.arange(2, len(source.shape), dtype=np.int64))
    axes = initializer(graph, fresh.make(f"{pool.name}/axes"), spatial)
    mean = ir.node("ReduceMean", [source, axes], attributes={"keepdims": 1}, name=f"{pool.name}/mean")
    graph.insert_before(pool, mean)
    mean.outputs[0].type, mean.outputs[0].shape = output.type, output.shape
    replace_output(graph, pool, mean.outputs[0])
