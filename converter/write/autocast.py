"""Puts a torch module into mixed precision for tracing: matrices in bf16, norms and residual sums in fp32, fp32 edges.

An all-bf16 module rounds the residual stream after every addition: MiniLM then drifts by 1.4e-2, and by 9e-3 this way.
The rules are those of torch.autocast, but the weights are rounded once here instead of at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from converter.process.tensorfiles import TensorFiles


class Edges(torch.nn.Module):
    """Runs ``module`` under autocast and widens bf16 outputs, so that inputs and outputs are float32."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            outputs = self.module(*tensors)
        return tuple(_widen(output) for output in outputs)


@contextmanager
def narrowed(module: torch.nn.Module, scratch: Path) -> Iterator[torch.nn.Module]:
    """Round ``module``'s matrices and their biases to bf16 while the block runs; then restore them.

    The rounded tensors are kept in temporary files in ``scratch``.

    1-D parameters of norms stay fp32. Kernels that need input and parameters of one dtype (norms on CUDA) get fp32
    inputs, and tables return fp32. Recurrent layers stay fp32 as a whole: torch has no bf16 kernel for them on many
    CPUs. A state rounded at every step would also drift with the length.
    """
    with ExitStack() as undo:
        with TensorFiles(scratch):
            for part in module.modules():
                _narrow(part, undo)
        yield module


def _narrow(part: torch.nn.Module, undo: ExitStack) -> None:
    if isinstance(part, torch.nn.RNNBase | torch.nn.RNNCellBase):
        undo.callback(setattr, part, "forward", part.forward)
        part.forward = _in_fp32(part.forward)
        return
    own = list(part.parameters(recurse=False))
    has_matrix = any(parameter.ndim > 1 for parameter in own)
    if has_matrix:
        for parameter in own:
            undo.callback(setattr, parameter, "data", parameter.data)
            parameter.data = _rounded(parameter.data)
    elif own:
        undo.callback(part.register_forward_pre_hook(_widen_inputs).remove)
    if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag):
        undo.callback(part.register_forward_hook(_widen_output).remove)


def _in_fp32(forward: Callable[..., Any]) -> Callable[..., Any]:
    def widened(*inputs: Any, **named: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return forward(*(_widen(value) for value in inputs), **{key: _widen(v) for key, v in named.items()})

    return widened


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.dtype is torch.float32 else tensor


def _widen(value: Any) -> Any:
    if isinstance(value, tuple | list):  # an LSTM's state; a packed sequence is returned unchanged
        return type(value)(map(_widen, value)) if type(value) in (tuple, list) else value
    return value.to(torch.float32) if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 else value


def _widen_inputs(_module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_widen(value) for value in inputs)


def _widen_output(_module: torch.nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
    return _widen(output)
