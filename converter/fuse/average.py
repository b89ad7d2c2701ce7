"""Splits means of images that the kernel convolves, so that a row's bits do not depend on its batch."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bf16kit.converter.fuse.functions import REDUCTION_AXES_SINCE, Fusing
from bf16kit.converter.fuse.regions import MEANS, source
from bf16kit.converter.graph.initializers import const, initializer
from bf16kit.runtime.ort.kernel import DOMAIN


def average(fusing: Fusing, node: ir.Node) -> None:
    """Split the mean ``node`` of an image of the kernel's, so that a row's bits do not depend on its batch.

    With channels last, ONNX Runtime's ReduceMean adds the pixels of one image in another order than those of several.
    So only each line is averaged there, then the lines by GlobalAveragePool, before which a Transpose stays.
    """
    if node.op_type not in MEANS:
        return
    x, given = node.inputs[0], node.attributes
    if x is None or x.shape is None or not _reads_kernel(x):
        return
    rank = len(x.shape)
    if node.op_type == "ReduceMean":
        tensor = const(node.inputs[1]) if len(node.inputs) > 1 else None
        axes = [*given.get_ints("axes", ())] if tensor is None else tensor.numpy().tolist()
        if sorted(axis % rank for axis in axes) != [*range(2, rank)]:
            return
    mean, height = x, x.shape[2]
    if rank == 4 and isinstance(height, int) and height > 1:
        inputs, axes = [x], {"axes": [3]}
        if fusing.opset >= REDUCTION_AXES_SINCE:
            name = fusing.fresh(f"{node.name}/axes")
            inputs, axes = [x, initializer(fusing.graph, name, ir.tensor(np.array([3], np.int64), name=name))], {}
        lines = ir.node("ReduceMean", inputs, {"keepdims": 1, **axes})
        mean = fusing.insert(lines, node, f"{node.name}/lines", x.type, [*x.shape[:3], 1])
    elif node.op_type == "GlobalAveragePool":
        return
    made = ir.node("GlobalAveragePool", [mean], name=node.name)
    fusing.graph.insert_before(node, made)
    if node.op_type == "ReduceMean" and not given.get_int("keepdims", 1):
        made.name = fusing.fresh(f"{node.name}/mean")
        made.outputs[0].name, made.outputs[0].type = made.name, x.type
        made.outputs[0].shape = ir.Shape([*x.shape[:2], *[1] * (rank - 2)])
        made = ir.node("Flatten", [made.outputs[0]], {"axis": 1}, name=node.name)
        fusing.graph.insert_before(node, made)
    fusing.replace("normalisation", node, [node], made, {node.outputs[0]: made.outputs[0]})


def _reads_kernel(x: ir.Value) -> bool:
    """Whether ``x`` is an image of the kernel's, moved back to channels first, or made of one by elementwise nodes."""
    producer = source(x)
    image = producer.inputs[0] if producer is not None and producer.op_type == "Transpose" else None
    made = None if image is None else image.producer()
    return made is not None and made.domain == DOMAIN
