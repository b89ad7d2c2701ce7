"""Translations of torch's operators to ONNX in place of its exporter's own, which compute something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _copied(self: Any, src: Any, non_blocking: bool = False) -> Any:
    """Translate ``self.copy_(src)``; torch's own translation does not broadcast ``src``."""
    from onnxscript import opset22 as op

    cast = op.CastLike(src, self)
    return cast if src.shape == self.shape else op.Expand(cast, op.Shape(self))


def _log_sigmoid(self: Any) -> Any:
    """Translate ``logsigmoid``; torch's own is a logarithm of ONNX Runtime's Sigmoid, which is 0 below -18."""
    from onnxscript import opset22 as op

    return op.Neg(op.Softplus(op.Neg(self)))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.copy.default: _copied,
    torch.ops.aten.log_sigmoid.default: _log_sigmoid,
}
