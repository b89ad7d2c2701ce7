"""Translates a frozen TensorFlow graph to ONNX with unchanged weights: part of :mod:`.worker`, and run in its process.

Like :mod:`.worker`, this imports nothing of bf16kit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_BY_PARTS = {"Erfc": "Erf", "Expm1": "Exp", "Log1p": "Log"}
_FIRST = 1 << 40  # of the numbers of nodes: tf2onnx uses small numbers for inputs
_UNNAMED = re.compile(r"unk__\d+")  # tf2onnx's name for an unnamed dimension


def translate(session: Any, inputs: Mapping[str, str], outputs: Mapping[str, str], opset: int, to: str) -> None:
    """Write the graph of ``session``, with its variables as constants, to the file ``to`` as ONNX of ``opset``.

    ``inputs`` and ``outputs`` map the names they will have to the session's tensors. Raises what ONNX's checker raises
    for operators that ONNX does not have, and ValueError for bfloat16.
    """
    import onnx
    import tensorflow as tf
    from tf2onnx import optimizer, tfonnx

    _disable_weight_folding()
    _number_nodes()
    names = {tensor: name for name, tensor in (*inputs.items(), *outputs.items())}
    nodes = [tensor.partition(":")[0] for tensor in outputs.values()]
    with session.graph.as_default():
        frozen = tf.compat.v1.graph_util.convert_variables_to_constants(session, session.graph.as_graph_def(), nodes)
    inlined = _inlined(frozen, list(names))
    _check_types(inlined)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(_simplified(inlined, list(names)), name="")
        found = tfonnx.process_tf_graph(
            graph,
            opset=opset,
            input_names=list(inputs.values()),
            output_names=list(outputs.values()),
            tensors_to_rename=names,
            custom_op_handlers=dict.fromkeys(_BY_PARTS, (_translate_by_parts, [])),
        )
    model = optimizer.optimize_graph(found).make_model("model")
    for dim in (dim for edge in (*model.graph.input, *model.graph.output) for dim in edge.type.tensor_type.shape.dim):
        if _UNNAMED.fullmatch(dim.dim_param):
            dim.ClearField("dim_param")
    onnx.save(model, to)
    onnx.checker.check_model(to)  # tf2onnx leaves operators in the graph that it does not translate


def _number_nodes() -> None:
    """Number tf2onnx's nodes, because sets in the order of addresses would change the names it writes in every run."""
    from tf2onnx.graph import Node
    from tf2onnx.optimizer import einsum_optimizer

    numbers: dict[int, tuple[int, Any]] = {}  # with the numbered objects, because an address may be used again

    def number(thing: Any) -> int:
        return numbers.setdefault(id(thing), (len(numbers) + _FIRST, thing))[0]

    Node.__hash__, einsum_optimizer.id = number, number  # its names and its keys are the addresses of its objects


def _disable_weight_folding() -> None:
    """Stop tf2onnx from folding into weights of convolutions: the converter does that, and can undo it."""
    from tf2onnx.optimizer import back_to_back_optimizer, transpose_optimizer

    back_to_back_optimizer._func_map.pop(("Conv", "BatchNormalization"), None)
    handle = transpose_optimizer.TransposeOptimizer._mul_handler

    def patched(self: Any, transposed: Any, node: Any) -> Any:
        convolution, single = transposed.inputs[0], self._nodes_has_single_consumer_node
        self._nodes_has_single_consumer_node = lambda nodes: nodes[0] is not convolution and single(nodes)
        try:
            return handle(self, transposed, node)
        finally:
            del self._nodes_has_single_consumer_node

    transpose_optimizer.TransposeOptimizer._mul_handler = patched


def _inlined(graph: Any, tensors: list[str]) -> Any:
    """Inline the calls in ``graph``, which tf2onnx would keep; branches and loops remain functions, as in ONNX."""
    for node in _all_nodes(graph):
        if "_lower_using_switch_merge" in node.attr:
            node.attr["_lower_using_switch_merge"].b = False
    return _rewritten(graph, tensors, ["function"])


def _all_nodes(graph: Any) -> list[Any]:
    return [*graph.node, *(node for function in graph.library.function for node in function.node_def)]


def _simplified(graph: Any, tensors: list[str]) -> Any:
    """Fold constants, except weights, which could not be restored: they are placeholders meanwhile."""
    import tensorflow as tf

    floats = (tf.float16.as_datatype_enum, tf.float32.as_datatype_enum, tf.float64.as_datatype_enum)
    weights = {}
    for node in graph.node:
        value = node.attr["value"].tensor if node.op == "Const" else None
        if value is not None and value.dtype in floats and len(value.tensor_shape.dim) > 1:
            weights[node.name] = type(node)()
            weights[node.name].CopyFrom(node)
            node.op = "Placeholder"
            node.attr["shape"].shape.CopyFrom(value.tensor_shape)
            del node.attr["value"]
    simplified = _rewritten(graph, tensors, ["constfold", "dependency"])
    for node in simplified.node:
        if node.name in weights:
            node.CopyFrom(weights[node.name])
    return simplified


def _rewritten(graph: Any, tensors: list[str], steps: list[str]) -> Any:
    """Return ``graph`` after Grappler's ``steps``; ``tensors`` are its inputs and outputs."""
    import tensorflow as tf
    from tensorflow.core.protobuf import rewriter_config_pb2
    from tensorflow.python.grappler import tf_optimizer

    config = tf.compat.v1.ConfigProto()
    options = config.graph_options.rewrite_options
    options.optimizers.extend(steps)
    options.function_optimization = rewriter_config_pb2.RewriterConfig.AGGRESSIVE
    options.min_graph_nodes = -1  # otherwise a small graph is not changed
    options.experimental_disable_folding_quantization_emulation = True
    with tf.Graph().as_default():
        tf.import_graph_def(graph, name="")
        meta = tf.compat.v1.train.export_meta_graph(graph_def=graph)
    meta.collection_def["train_op"].node_list.value.extend(tensors)
    found = tf_optimizer.OptimizeGraph(config, meta)
    for node in found.node:
        node.attr.pop("_class", None)  # placement beside another node, which may no longer exist
    return found


def _check_types(graph: Any) -> None:
    """Raise ValueError for a node that computes in bfloat16."""
    from tensorflow.core.framework import types_pb2

    for node in _all_nodes(graph):
        for attribute in node.attr.values():
            if types_pb2.DT_BFLOAT16 in (attribute.type, *attribute.list.type):
                raise ValueError(
                    f"node {node.name!r} ({node.op}) computes in bfloat16; tf2onnx would write fp16 in its place."
                    " Export the model in float32 (Keras: the dtype policy 'float32'), which the conversion then rounds"
                )


def _translate_by_parts(context: Any, node: Any, _name: str, _arguments: Any) -> None:
    """Translate erfc(x) = 1 − erf(x), which Keras 3's gelu uses, expm1 and log1p, which tf2onnx does not know."""
    import numpy
    from tf2onnx import utils

    dtype = utils.map_onnx_to_numpy_type(context.get_dtype(node.input[0]))
    one = context.make_const(utils.make_name("one"), numpy.array(1, dtype)).output[0]
    found, known = node.output[0], node.type
    node.type = _BY_PARTS[known]
    if known == "Log1p":
        context.insert_new_node_on_input(node, "Add", [node.input[0], one])
    else:
        context.insert_new_node_on_output("Sub", found, inputs=[one, found] if known == "Erfc" else [found, one])
