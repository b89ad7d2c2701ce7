"""Rewrites the inlined graph of a loaded TorchScript module before its first run: bf16 to fp32, and its device.

Tracing stores dtypes and devices in the graph as constants. One integer constant may serve several operators: 15 is
bfloat16 for ``aten::to`` and a length for ``aten::arange``. So a dtype is replaced only where an operator's schema
calls the argument a dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

Graph: TypeAlias = Any  # torch.Graph, typed without its methods
Node: TypeAlias = Any  # torch.Node
Module: TypeAlias = Any  # torch.jit.ScriptModule

# c10::ScalarType, part of the file format
BFLOAT16 = 15
FLOAT32 = 6


def tensors(module: Module, graph: Graph) -> Iterator[Tensor]:
    """Yield every tensor the graph reads: parameters, buffers and other attributes of ``module``, and constants."""
    return (tensor for node in nodes(graph) if (tensor := tensor_of(module, node)) is not None)


def tensor_of(module: Module, node: Node) -> Tensor | None:
    """Return the tensor of ``node`` if that is a constant or an attribute of ``module``."""
    if node.kind() == "prim::Constant" and node.hasAttribute("value") and node.kindOf("value") == "t":
        constant: Tensor = node.t("value")
        return constant
    if node.kind() == "prim::GetAttr" and node.output().type().kind() == "TensorType":
        attribute: Tensor = owner_of(module, node).getattr(node.s("name"))
        return attribute
    return None


def widen(module: Module) -> None:
    """Widen ``module`` from bf16 to fp32: exactly the same weights, a tensor that several names share once, in fp32."""
    wide: dict[tuple[Any, ...], Tensor] = {}
    for node in list(nodes(module.graph)):
        for index in _dtype_arguments(node):
            if _integer(node.inputsAt(index)) == BFLOAT16:
                module.graph.setInsertPoint(node)
                node.replaceInput(index, module.graph.insertConstant(FLOAT32))
    for node in nodes(module.graph):
        tensor = tensor_of(module, node)
        if tensor is None or tensor.dtype != torch.bfloat16:
            continue
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if key not in wide:
            wide[key] = tensor.detach().float()
        if node.kind() == "prim::Constant":
            node.t_("value", wide[key])
        else:
            owner_of(module, node).setattr(node.s("name"), wide[key])


def replace_devices(graph: Graph, device: str) -> None:
    """Set every device constant to ``device``, e.g. ``cuda:0``: a module traced on the CPU names the CPU."""
    for node in nodes(graph):
        if node.kind() == "prim::Constant" and node.output().type().kind() == "DeviceObjType":
            node.s_("value", device)


def nodes(block: Any) -> Iterator[Node]:
    """Yield every node of a graph or block, and of the blocks inside its nodes."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from nodes(inner)


def path_of(node: Node) -> tuple[str, ...]:
    """Return the names from the module to the attribute: ``("encoder", "linear", "weight")``."""
    names = [node.s("name")]
    owner = node.input().node()
    while owner.kind() == "prim::GetAttr":
        names.append(owner.s("name"))
        owner = owner.input().node()
    return tuple(reversed(names))


def owner_of(module: Module, node: Node) -> Any:
    """Return the C++ object whose attribute ``node`` reads."""
    owner = module._c  # the C++ module: the only way to attributes that are neither parameters nor buffers
    for name in path_of(node)[:-1]:
        owner = owner.getattr(name)
    return owner


def _dtype_arguments(node: Node) -> list[int]:
    if node.kind() in ("aten::eq", "aten::ne"):  # x.dtype == torch.bfloat16
        compared = [node.inputsAt(i).node().kind() for i in range(node.inputsSize())]
        return list(range(len(compared))) if "prim::dtype" in compared else []
    schema = node.schema()
    if "::" not in schema:  # torch says "(no schema)"
        return []
    arguments = torch._C.parse_schema(schema).arguments[: node.inputsSize()]
    return [index for index, argument in enumerate(arguments) if argument.name.endswith("dtype")]


def _integer(value: Any) -> int | None:
    node = value.node()
    is_integer = node.kind() == "prim::Constant" and node.hasAttribute("value") and node.kindOf("value") == "i"
    return int(node.i("value")) if is_integer else None
