"""The tensors of a model that a checkpoint's leaves must fill: of a torch module, or of an ONNX graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

# How a weight is used, which determines its axes: a Linear's are [out, in], a MatMul's [in, out], a Conv's [out, in,
# …], an embedding table's [rows, width]. A deconv's kernel is mirrored between frameworks, so it is never proposed.
Use = Literal["linear", "matmul", "conv", "deconv", "table", "plain"]

_ROLES = {"weight": "weight", "bias": "bias", "running_mean": "mean", "running_var": "var"}
_ONNX_ROLES = {
    "BatchNormalization": ("", "weight", "bias", "mean", "var"),
    "LayerNormalization": ("", "weight", "bias"),
    "GroupNormalization": ("", "weight", "bias"),
    "InstanceNormalization": ("", "weight", "bias"),
    "Conv": ("", "weight", "bias"),
    "ConvTranspose": ("", "weight", "bias"),
    "Gemm": ("", "weight", "bias"),
    "MatMul": ("", "weight"),
    "Gather": ("weight",),
}


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a model. ``role``: weight, bias, mean, var, or "" if unknown."""

    name: str
    shape: tuple[int, ...]
    use: Use
    role: str
    floating: bool = True


@dataclass(frozen=True, slots=True)
class Slots:
    """The tensors of a model by name; ``twins`` maps a further name of a tensor to its first name."""

    by_name: Mapping[str, Slot]
    twins: Mapping[str, str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: slot.shape for name, slot in self.by_name.items()}


def of_module(module: torch.nn.Module) -> Slots:
    """Return the parameters and buffers in the state dict of ``module``."""
    found: dict[str, Slot] = {}
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    twins: dict[str, str] = {}
    for name, tensor in module.state_dict().items():
        owner, _, attribute = name.rpartition(".")
        use = _use_in(module.get_submodule(owner)) if attribute == "weight" else "plain"
        shape = tuple(tensor.shape)
        found[name] = Slot(name, shape, use, _ROLES.get(attribute, ""), tensor.dtype.is_floating_point)
        place = (tensor.data_ptr(), shape)
        if tensor.numel() and place in first:
            twins[name] = first[place]
        first.setdefault(place, name)
    return Slots(found, twins)


def _use_in(owner: torch.nn.Module) -> Use:
    from torch import nn

    if isinstance(owner, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return "deconv"
    if isinstance(owner, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return "conv"
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        return "table"
    return "linear" if isinstance(owner, nn.Linear) else "plain"


def of_graph(model: ir.Model) -> Slots:
    """Return the floating-point initializers of ``model``'s main graph, except scalars, which belong to the graph."""
    found = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point() or not len(tensor.shape):
            continue
        uses = list(_uses(value))
        use, role = uses[0] if uses else ("plain", "")
        shape = tuple(int(size) for size in tensor.shape.numpy())
        found[name] = Slot(name, shape, use, role or _ROLES.get(name.rpartition(".")[2], ""))
    return Slots(found, {})


def _uses(value: ir.Value) -> Iterator[tuple[Use, str]]:
    """Yield how each node uses a weight, and in which role; follows transposes."""
    for node, index in value.uses():
        roles = _ONNX_ROLES.get(node.op_type, ())
        role = roles[index] if index < len(roles) else ""
        if node.op_type == "Gemm" and index == 1:
            transposed = node.attributes.get("transB")
            yield ("linear" if transposed is not None and transposed.as_int() else "matmul"), role
        elif node.op_type in _USES and role == "weight":
            yield _USES[node.op_type], role
        elif role:
            yield "plain", role
        elif (
            node.op_type == "Transpose"
            and len(node.outputs[0].uses())
            and value.shape is not None
            and len(value.shape) == 2
        ):
            yield from (("linear" if use == "matmul" else use, role) for use, role in _uses(node.outputs[0]))


_USES: Mapping[str, Use] = {"MatMul": "matmul", "Conv": "conv", "ConvTranspose": "deconv", "Gather": "table"}
