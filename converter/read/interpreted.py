"""Runs a TorchScript graph as a torch module that exporters can trace: its operators are called one by one in Python.

torch.export cannot trace a ScriptModule. Here every branch and loop is decided during tracing, by shapes and constants.
Branches on the values of a tensor cannot be traced.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from bf16kit.messages.errors import ConversionError
from bf16kit.runtime import scriptgraph

_OF_LISTS = ("aten::append", "aten::extend", "aten::_set_item")

# TorchScript's numbers for dtypes, layouts and memory formats.
_DTYPES: Mapping[int, torch.dtype] = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 8: torch.complex32, 9: torch.complex64, 10: torch.complex128, 11: torch.bool, 15: torch.bfloat16,
}  # fmt: skip
_NUMBERS: Mapping[torch.dtype, int] = {dtype: number for number, dtype in _DTYPES.items()}
_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
_ENUMS: Mapping[str, Mapping[int, Any]] = {"layout": {0: torch.strided}, "memory_format": dict(enumerate(_FORMATS))}


def _argument(name: str, value: Any) -> Any:
    """Convert ``value`` for torch's Python functions, as an argument called ``name``; every device becomes the CPU."""
    if name == "device" and value is not None:
        return torch.device("cpu")
    table = _DTYPES if name.endswith("dtype") else _ENUMS.get(name, {})
    return table.get(value, value) if type(value) is int else value


# Sizes are treated as numbers, so that the symbols that torch.export uses for them pass through.
def _item(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _as_integer(value: Any) -> Any:
    value = _item(value)
    return value if isinstance(value, int | torch.SymInt) else int(value)


def _as_float(value: Any) -> Any:
    value = _item(value)
    return value if isinstance(value, float | torch.SymFloat | torch.SymInt) else float(value)


def _appended(values: list[Any], value: Any) -> list[Any]:
    values.append(value)
    return values


def _put(values: Any, key: Any, value: Any) -> Any:
    values[key] = value
    return values


def _part(values: Any, start: Any, end: Any, step: Any = 1) -> Any:
    return values[start : min(end, len(values)) if end is not None else None : step]


def _divided(left: Any, right: Any, rounding: str | None = None) -> Any:
    if rounding == "floor":
        return left // right
    return left / right if rounding is None else math.trunc(left / right)


def _raise(said: str, *_: Any) -> None:
    raise ConversionError(f"the TorchScript module raises an error of its own: {said}"[:300])


_OPERATORS = "add eq floordiv ge gt le lt mul ne neg pow sub __and__ __contains__ __getitem__ __or__ __xor__"
# Operators on numbers, strings and lists; those named as in Python's `operator`, `math` and built-ins come first.
_PLAIN: Mapping[str, Callable[..., Any]] = {
    **{f"aten::{name}": getattr(operator, name) for name in _OPERATORS.split()},
    **{f"aten::{name}": getattr(math, name) for name in ("ceil", "floor", "log", "sqrt")},
    **{f"aten::{call.__name__}": call for call in (all, any, list, max, min, str)},
    **{f"prim::{call.__name__}": call for call in (abs, max, min)},
    "aten::__derive_index": lambda index, start, step: start + index * step,
    "aten::__is__": operator.is_,
    "aten::__isnot__": operator.is_not,
    "aten::__not__": operator.not_,
    "aten::__range_length": lambda low, high, step: len(range(low, high, step)),
    "aten::_set_item": _put,
    "aten::append": _appended,
    "aten::copy": lambda values: values.copy(),
    "aten::div": _divided,
    "aten::extend": lambda values, more: values.extend(more),
    "aten::floor_divide": operator.floordiv,
    "aten::format": lambda text, *values: text.format(*values),
    "aten::items": lambda values: list(values.items()),
    "aten::keys": lambda values: list(values.keys()),
    "aten::remainder": operator.mod,
    "aten::slice": _part,
    "aten::values": lambda values: list(values.values()),
}

# Operators on tensors, with results that make a module take the branch that every exporter can trace; and containers.
_ALWAYS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("aten::Float", "aten::FloatImplicit"), _as_float),
    **dict.fromkeys(("aten::Int", "aten::IntImplicit"), _as_integer),
    **dict.fromkeys(("aten::warn", "prim::Print", "prim::Uninitialized"), lambda *_: None),
    **{f"prim::is_{what}": lambda _: False for what in ("cuda", "mkldnn", "nested", "quantized", "sparse")},
    **dict.fromkeys(("aten::_unwrap_optional", "prim::NumToTensor", "prim::data"), lambda value: value),
    **dict.fromkeys(("prim::unchecked_cast", "prim::unchecked_unwrap_optional"), lambda value: value),
    "aten::Bool": lambda value: value.item() if isinstance(value, torch.Tensor) else bool(value),
    "aten::ScalarImplicit": _item,
    "aten::__is__": operator.is_,
    "aten::__isnot__": operator.is_not,
    "aten::_convolution": lambda *given: torch.ops.aten.convolution(*given[:9]),  # the other arguments choose a kernel
    "aten::dim": lambda tensor: tensor.dim(),
    "aten::is_autocast_enabled": lambda *_: False,
    "aten::is_grad_enabled": lambda: True,  # otherwise transformers use a fused operator that ONNX does not have
    "aten::is_scripting": lambda: True,
    "aten::len": lambda value: value.size(0) if isinstance(value, torch.Tensor) else len(value),
    "aten::numel": lambda tensor: tensor.numel(),
    # Python's method: torch.ops' ``size`` would turn a symbol into a plain number.
    "aten::size": lambda tensor, *axis: tensor.size(*axis) if axis else list(tensor.size()),
    "aten::stride": lambda tensor, *axis: tensor.stride(*axis) if axis else list(tensor.stride()),
    "prim::DictConstruct": lambda *given: dict(zip(given[::2], given[1::2], strict=True)),
    "prim::ListConstruct": lambda *given: list(given),
    "prim::RaiseException": _raise,
    "prim::TupleConstruct": lambda *given: given,
    "prim::TupleIndex": operator.getitem,
    "prim::device": lambda tensor: tensor.device,
    "prim::dtype": lambda tensor: _NUMBERS[tensor.dtype],
    "prim::is_cpu": lambda _: True,
    "prim::layout": lambda _: 0,
    "prim::requires_grad": lambda _: True,  # as is_grad_enabled
    "prim::tolist": lambda tensor, *_: tensor.tolist(),
    "prim::type": lambda device: device.type,
}


@dataclass(frozen=True)
class _Ref:
    """A reference to one of the module's tensors by name: torch.export replaces the tensor while it traces."""

    name: str


class Interpreted(torch.nn.Module):
    """Computes what the graph of ``script`` computes; its ``tensors``, by name, are the parameters and buffers.

    ``failure.operator`` is the innermost operator that could not be traced: exporters bury the reason in pages of
    context.
    """

    def __init__(self, script: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._graph = script.graph
        self._defaults = [argument.default_value for argument in script.forward.schema.arguments[1:]]
        self._attributes: dict[str, Any] = {}
        self.failure = SimpleNamespace(operator="")  # not an attribute: exporters restore a module's attributes
        self.own = torch.nn.Module()
        known: dict[tuple[Any, ...], str] = {}
        for name, tensor in tensors.items():
            known.setdefault(place(tensor), name)
            _register(self.own, name.split("."), tensor)
        for node in scriptgraph.nodes(self._graph):
            output = node.output().debugName() if node.outputsSize() == 1 else ""
            if node.kind() == "prim::GetAttr" and node.output().type().kind() not in ("ClassType", "InterfaceType"):
                value = scriptgraph.owner_of(script, node).getattr(node.s("name"))
                self._attributes[output] = tree_map(partial(_referred, known), value)
            elif node.kind() == "prim::Constant":
                self._attributes[output] = tree_map(partial(_referred, known), node.output().toIValue())

    def forward(self, *inputs: torch.Tensor) -> Any:
        given = [*inputs, *self._defaults[len(inputs) :]]
        values = dict(zip([value.debugName() for value in self._graph.inputs()], [None, *given], strict=True))
        return self._run(self._graph, values)[0]

    def _run(self, block: Any, values: dict[str, Any]) -> list[Any]:
        for node in block.nodes():
            try:
                results = self._results(node, values)
            except Exception:
                self.failure.operator = self.failure.operator or node.kind()
                raise
            values.update(zip([value.debugName() for value in node.outputs()], results, strict=True))
        return [values[value.debugName()] for value in block.outputs()]

    def _results(self, node: Any, values: dict[str, Any]) -> list[Any]:
        kind = node.kind()
        if kind in ("prim::Constant", "prim::GetAttr"):
            return [tree_map(self._resolved, self._attributes.get(node.output().debugName()))]
        given = [values[value.debugName()] for value in node.inputs()]
        if kind == "prim::If":
            return self._run(list(node.blocks())[0 if bool(given[0]) else 1], values)
        if kind == "prim::Loop":
            return self._loop(node, given, values)
        if kind in ("prim::ListUnpack", "prim::TupleUnpack"):
            return list(given[0])
        result, count = _call(node, kind, given), node.outputsSize()
        return [result] if count == 1 else list(result) if count else []

    def _loop(self, node: Any, given: list[Any], values: dict[str, Any]) -> list[Any]:
        """Run a loop: its body takes the iteration's number and the carried values, and returns whether to continue."""
        most, goes_on, *carried = given
        (body,) = node.blocks()
        names = [value.debugName() for value in body.inputs()]
        turn = 0
        while turn < most and bool(goes_on):
            values.update(zip(names, [turn, *carried], strict=True))
            goes_on, *carried = self._run(body, values)
            turn += 1
        return carried

    def _resolved(self, value: Any) -> Any:
        return reduce(getattr, value.name.split("."), self.own) if isinstance(value, _Ref) else value


def _call(node: Any, kind: str, given: list[Any]) -> Any:
    always = _ALWAYS.get(kind)
    if always is not None:
        return always(*given)
    plain = _PLAIN.get(kind)
    if plain is not None and not (given and isinstance(given[0], torch.Tensor)):
        if kind not in _OF_LISTS:  # a trace holds numbers as tensors without dimensions
            given = [one.item() if isinstance(one, torch.Tensor) and one.ndim == 0 else one for one in given]
        return plain(*given)
    name, _, overload = node.schema().partition("(")[0].replace("::", ".").partition(".")[2].partition(".")
    try:
        call = getattr(getattr(getattr(torch.ops, kind.partition("::")[0]), name), overload or "default")
    except (AttributeError, RuntimeError):
        raise ConversionError(f"the TorchScript operator {kind} is not supported") from None
    arguments = list(zip(call._schema.arguments, given, strict=True))
    positional = (_argument(argument.name, value) for argument, value in arguments if not argument.kwarg_only)
    named = {argument.name: _argument(argument.name, value) for argument, value in arguments if argument.kwarg_only}
    return call(*positional, **named)


def _referred(known: Mapping[tuple[Any, ...], str], value: Any) -> Any:
    name = known.get(place(value)) if isinstance(value, torch.Tensor) else None
    return value if name is None else _Ref(name)


def place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what tells ``tensor`` apart from others: its memory and how it is read."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _register(holder: torch.nn.Module, path: list[str], tensor: torch.Tensor) -> None:
    for part in path[:-1]:
        if part not in holder._modules:
            holder.add_module(part, torch.nn.Module())
        holder = holder.get_submodule(part)
    if tensor.is_floating_point():
        holder.register_parameter(path[-1], torch.nn.Parameter(tensor.detach(), requires_grad=False))
    else:
        holder.register_buffer(path[-1], tensor)
