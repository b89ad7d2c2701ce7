"""TorchScript's operators on numbers, strings and lists, and the meaning of its numbers for dtypes and layouts.

Sizes are treated as numbers, so that the symbols that torch.export uses for them pass through.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

DTYPES: Mapping[int, torch.dtype] = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 8: torch.complex32, 9: torch.complex64, 10: torch.complex128, 11: torch.bool, 15: torch.bfloat16,
}  # fmt: skip
NUMBERS: Mapping[torch.dtype, int] = {dtype: number for number, dtype in DTYPES.items()}
_LAYOUTS = {0: torch.strided}
_FORMATS = {0: torch.contiguous_format, 1: torch.preserve_format, 2: torch.channels_last, 3: torch.channels_last_3d}


def argument(name: str, value: Any) -> Any:
    """Convert ``value`` for torch's Python functions, as an argument called ``name``; every device becomes the CPU."""
    if name == "device" and value is not None:
        return torch.device("cpu")
    table: Mapping[int, Any] = {}
    if name.endswith("dtype"):
        table = DTYPES
    elif name == "layout":
        table = _LAYOUTS
    elif name == "memory_format":
        table = _FORMATS
    return table.get(value, value) if type(value) is int else value


def as_integer(value: Any) -> Any:
    """Return ``value`` as an integer; a symbol stays a symbol."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return value if isinstance(value, int | torch.SymInt) else int(value)


def as_float(value: Any) -> Any:
    """Return ``value`` as a floating-point number; a symbol stays a symbol."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return value if isinstance(value, float | torch.SymFloat | torch.SymInt) else float(value)


def _appended(values: list[Any], value: Any) -> list[Any]:
    values.append(value)
    return values


def _extended(values: list[Any], more: list[Any]) -> None:
    values.extend(more)


def _put(values: Any, key: Any, value: Any) -> Any:
    values[key] = value
    return values


def _part(values: Any, start: Any, end: Any, step: Any = 1) -> Any:
    return values[start : min(end, len(values)) if end is not None else None : step]


def _divided(left: Any, right: Any, rounding: str | None = None) -> Any:
    if rounding == "floor":
        return left // right
    return left / right if rounding is None else math.trunc(left / right)


def _size(tensor: torch.Tensor, *axis: int) -> Any:
    """Return sizes by Python's method; torch.ops' ``size`` would turn a symbol into a plain number."""
    return tensor.size(*axis) if axis else list(tensor.size())


PLAIN: Mapping[str, Callable[..., Any]] = {
    "aten::__and__": operator.and_,
    "aten::__contains__": operator.contains,
    "aten::__derive_index": lambda index, start, step: start + index * step,
    "aten::__getitem__": operator.getitem,
    "aten::__is__": operator.is_,
    "aten::__isnot__": operator.is_not,
    "aten::__not__": operator.not_,
    "aten::__or__": operator.or_,
    "aten::__range_length": lambda low, high, step: len(range(low, high, step)),
    "aten::__xor__": operator.xor,
    "aten::_set_item": _put,
    "aten::add": operator.add,
    "aten::all": all,
    "aten::any": any,
    "aten::append": _appended,
    "aten::ceil": math.ceil,
    "aten::copy": lambda values: values.copy(),
    "aten::div": _divided,
    "aten::eq": operator.eq,
    "aten::extend": _extended,
    "aten::floor": math.floor,
    "aten::floor_divide": operator.floordiv,
    "aten::floordiv": operator.floordiv,
    "aten::format": lambda text, *values: text.format(*values),
    "aten::ge": operator.ge,
    "aten::gt": operator.gt,
    "aten::items": lambda values: list(values.items()),
    "aten::keys": lambda values: list(values.keys()),
    "aten::le": operator.le,
    "aten::len": len,
    "aten::list": list,
    "aten::log": math.log,
    "aten::lt": operator.lt,
    "aten::max": max,
    "aten::min": min,
    "aten::mul": operator.mul,
    "aten::ne": operator.ne,
    "aten::neg": operator.neg,
    "aten::pow": operator.pow,
    "aten::remainder": operator.mod,
    "aten::slice": _part,
    "aten::sqrt": math.sqrt,
    "aten::str": str,
    "aten::sub": operator.sub,
    "aten::values": lambda values: list(values.values()),
    "prim::abs": abs,
    "prim::max": max,
    "prim::min": min,
}

# Operators on tensors, with results that make a module take the branch that every exporter can trace.
ALWAYS: Mapping[str, Callable[..., Any]] = {
    "aten::Bool": lambda value: value.item() if isinstance(value, torch.Tensor) else bool(value),
    "aten::Float": as_float,
    "aten::FloatImplicit": as_float,
    "aten::Int": as_integer,
    "aten::IntImplicit": as_integer,
    "aten::ScalarImplicit": lambda value: value.item() if isinstance(value, torch.Tensor) else value,
    "aten::__is__": operator.is_,
    "aten::__isnot__": operator.is_not,
    "aten::_unwrap_optional": lambda value: value,
    "aten::_convolution": lambda *given: torch.ops.aten.convolution(*given[:9]),  # the other arguments choose a kernel
    "aten::dim": lambda tensor: tensor.dim(),
    "aten::is_autocast_enabled": lambda *_: False,
    "aten::is_grad_enabled": lambda: True,  # otherwise transformers use a fused operator that ONNX does not have
    "aten::is_scripting": lambda: True,
    "aten::numel": lambda tensor: tensor.numel(),
    "aten::size": _size,
    "aten::stride": lambda tensor, *axis: tensor.stride(*axis) if axis else list(tensor.stride()),
    "aten::warn": lambda *_: None,
    "prim::NumToTensor": lambda value: value,
    "prim::Print": lambda *_: None,
    "prim::Uninitialized": lambda: None,
    "prim::data": lambda value: value,
    "prim::device": lambda tensor: tensor.device,
    "prim::dtype": lambda tensor: NUMBERS[tensor.dtype],
    "prim::is_cpu": lambda tensor: True,
    "prim::is_cuda": lambda tensor: False,
    "prim::is_mkldnn": lambda tensor: False,
    "prim::is_nested": lambda tensor: False,
    "prim::is_quantized": lambda tensor: False,
    "prim::is_sparse": lambda tensor: False,
    "prim::layout": lambda tensor: 0,
    "prim::requires_grad": lambda tensor: True,  # as is_grad_enabled
    "prim::tolist": lambda tensor, *_: tensor.tolist(),
    "prim::type": lambda device: device.type,
    "prim::unchecked_cast": lambda value: value,
    "prim::unchecked_unwrap_optional": lambda value: value,
}
