"""Translations of torch's operators to ONNX in place of its exporter's own, which are wrong or take far too long."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode


def _copied(self: Any, src: Any, non_blocking: bool = False) -> Any:
    """Translate ``self.copy_(src)``; torch's own translation does not broadcast ``src``."""
    from onnxscript import opset22 as op

    cast = op.CastLike(src, self)
    return cast if src.shape == self.shape else op.Expand(cast, op.Shape(self))


def _log_sigmoid(self: Any) -> Any:
    """Translate ``logsigmoid``; torch's own is a logarithm of ONNX Runtime's Sigmoid, which is 0 below -18."""
    from onnxscript import opset22 as op

    return op.Neg(op.Softplus(op.Neg(self)))


def _conv3d(
    self: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Any:
    """Translate ``conv3d``; torch's own gives one without a bias a bias [channels, 2], which no runtime takes."""
    from onnxscript import opset22

    op: Any = opset22  # its types do not allow that one result is another operator's input
    strides, pads, dilations = (np.broadcast_to(each, 3).tolist() for each in (stride, padding, dilation))
    batched, first = len(self.shape) == len(weight.shape), op.Constant(value_ints=[0])
    x = self if batched else op.Unsqueeze(self, first)
    found = op.Conv(x, weight, bias, strides=strides, pads=pads * 2, dilations=dilations, group=groups)
    return found if batched else op.Squeeze(found, first)


_MEAN, _LARGEST = 1, 2  # modes of embedding_bag; 0 is the sum


def _embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    _scale_grad_by_freq: bool = False,
    mode: int = 0,
    _sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Any, ...]:
    """Translate ``embedding_bag``, of ``indices`` with one dimension.

    torch's own is a loop over the bags, which takes a time that grows with their square, and fails without a bag.
    """
    from onnxscript import opset22

    op: Any = opset22  # its types do not allow that one result is another operator's input
    nought, one = op.Constant(value_ints=[0]), op.Constant(value_ints=[1])
    # Which bag each index is in: as many as offsets are not beyond it, less one. An empty bag at the end is beyond all.
    none = op.Expand(nought, op.Add(op.Shape(indices), one))
    begun = op.ScatterElements(none, offsets, op.Expand(one, op.Shape(offsets)), axis=0, reduction="add")
    bags = op.Unsqueeze(op.Slice(op.Sub(op.CumSum(begun, nought), one), nought, op.Neg(one)), one)
    used = op.Expand(op.CastLike(one, weight), op.Shape(indices)) if per_sample_weights is None else per_sample_weights
    zero = op.CastLike(nought, weight)
    if padding_idx is not None:
        used = op.Where(op.Equal(indices, op.CastLike(op.Constant(value_int=padding_idx), indices)), zero, used)
    used = op.Unsqueeze(used, one)
    rows = op.Mul(op.Gather(weight, indices), used)
    fill = op.CastLike(op.Constant(value_floats=[-math.inf]), weight) if mode == _LARGEST else zero
    if mode == _LARGEST:
        rows = op.Where(op.Equal(used, zero), fill, rows)
    into = op.Expand(fill, op.Concat(op.Shape(offsets), op.Shape(weight, start=1), axis=0))
    where = op.Expand(bags, op.Shape(rows))
    found = op.ScatterElements(into, where, rows, axis=0, reduction="max" if mode == _LARGEST else "add")
    if mode == _MEAN:
        counts = op.Expand(zero, op.Concat(op.Shape(offsets), one, axis=0))
        counts = op.ScatterElements(counts, bags, used, axis=0, reduction="add")
        found = op.Div(found, op.Max(counts, op.CastLike(one, weight)))
    if mode == _LARGEST:
        found = op.Where(op.Equal(found, fill), zero, found)
    if include_last_offset:
        found = op.Slice(found, nought, op.Neg(one))
    return found, *(op.Identity(offsets) for _ in range(3))  # for training; torch gives each a name and a shape


_MAX_POOL_1D = (torch.max_pool1d, torch.nn.functional.max_pool1d)


class PoolsOfAnyLength(TorchFunctionMode):
    """While a module is exported, ``max_pool1d`` is a ``max_pool2d`` of height 1: torch would fix the length."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function not in _MAX_POOL_1D or kwargs.get("return_indices"):
            return function(*args, **kwargs)
        kwargs.pop("return_indices", None)
        return _pooled(*args, **kwargs)


def _pooled(
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> torch.Tensor:
    def along(value: Any, other: int) -> list[int]:
        return [other, *(value if isinstance(value, list | tuple) else [value])]

    window, step = along(kernel_size, 1), along(stride or kernel_size, 1)
    found = torch.max_pool2d(input.unsqueeze(-2), window, step, along(padding, 0), along(dilation, 1), ceil_mode)
    return found.squeeze(-2)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.conv3d.default: _conv3d,
    torch.ops.aten.copy.default: _copied,
    torch.ops.aten.embedding_bag.padding_idx: _embedding_bag,
    torch.ops.aten.log_sigmoid.default: _log_sigmoid,
}
