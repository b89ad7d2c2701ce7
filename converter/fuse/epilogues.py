"""Finds the bias and the activation after a product, which the kernel applies before the result leaves registers."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from converter.fuse.activations import Activation, activation
from converter.fuse.products import Product, takes_bias
from converter.graph.initializers import const, dims
from converter.graph.values import only_reader


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The ``nodes`` after a product, in order, which are not needed if the kernel does their work.

    ``bias`` is an initializer of one number per column. ``result`` is the output of the last of product and nodes.
    ``reshape`` is a Reshape between bias and activation; it stays, after the kernel's node.
    """

    bias: ir.Value | None
    activation: Activation
    nodes: tuple[ir.Node, ...]
    result: ir.Value
    reshape: ir.Node | None = None


def epilogue(product: Product) -> Epilogue:
    """Return the longest epilogue of ``product``: the nodes up to the first value that others read too."""
    result, bias = product.node.outputs[0], product.bias
    nodes: list[ir.Node] = []
    add = None if bias is not None or product.node.op_type == "Conv" else _add(product.node, product.n)
    if add is not None:
        bias = add.inputs[1] if add.inputs[0] is result else add.inputs[0]
        result = add.outputs[0]
        nodes.append(add)
    reshape = None
    function, activated = activation(result)
    if not activated and (moving := _reshape(result)) is not None:
        function, activated = activation(moving.outputs[0])
        reshape = moving if activated else None
    if activated:
        result = activated[-1].outputs[0]
    return Epilogue(bias, function, (*nodes, *activated), result, reshape)


def _add(product: ir.Node, columns: int) -> ir.Node | None:
    """Return the Add of a bias, if it alone reads the output of ``product`` and adds no dimension."""
    given = product.outputs[0]
    node = only_reader(given)
    if node is None or node.op_type != "Add":
        return None
    bias = node.inputs[1] if node.inputs[0] is given else node.inputs[0]
    tensor = const(bias)
    rank = 1 if given.shape is None else len(given.shape)
    return node if takes_bias(bias, columns) and tensor is not None and len(dims(tensor)) <= rank else None


def _reshape(result: ir.Value) -> ir.Node | None:
    """Return the Reshape that alone reads ``result``. GPT-2 has one: it multiplies matrices and activates batches."""
    node = only_reader(result)
    return node if node is not None and node.op_type == "Reshape" and node.inputs[0] is result else None
