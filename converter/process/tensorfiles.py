"""Keeps large torch tensors in temporary files: a module is as large as its checkpoint, and would double its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bf16kit.runtime.memory.scratch import ScratchUnavailable, scratch_file

_LARGE = 1 << 20  # bytes; smaller tensors stay in memory
_UNFILLED = (torch.empty, torch.empty_like)
# The functions that create a tensor with its own memory. Those that share memory, such as from_numpy, are left out: a
# later write to that memory would not reach the tensor.
_MAKERS: frozenset[Any] = frozenset(
    (
        *_UNFILLED,
        *(torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.normal),
        *(torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like),
        *(torch.Tensor.clone, torch.clone, torch.Tensor.to, torch.Tensor.type),
        *(torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double),
        *(torch.Tensor.mul, torch.Tensor.div, torch.mul, torch.div),
    )
)


class TensorFiles(TorchFunctionMode):
    """While active, in its thread, new tensors of 1 MiB and more get a file in ``directory`` as their memory.

    A file has no name and is deleted with its tensor. Nothing else changes: values, strides and the state of random
    generators are torch's. If no file can be made (the directory is in memory, the disk is full), a tensor stays in
    memory.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _MAKERS or not _fills_its_memory(result) or _shares_memory(result, args):
            return result
        return self._to_file(result, filled=func not in _UNFILLED)

    def _to_file(self, tensor: torch.Tensor, *, filled: bool) -> torch.Tensor:
        try:
            with scratch_file(tensor.nbytes, self._directory) as (path, _):
                file = torch.from_file(str(path), shared=True, size=tensor.nbytes, dtype=torch.uint8)
        except ScratchUnavailable:
            return tensor
        moved = torch.empty(0, dtype=tensor.dtype).set_(file.untyped_storage(), 0, tensor.size(), tensor.stride())
        if filled:
            moved.copy_(tensor.detach())
        return moved.requires_grad_(tensor.requires_grad)


def _fills_its_memory(result: Any) -> bool:
    """Whether ``result`` is a large plain leaf tensor on the CPU that uses all of its storage."""
    return (
        type(result) is torch.Tensor
        and result.device.type == "cpu"
        and result.layout is torch.strided
        and result.nbytes >= _LARGE
        and result.is_leaf
        and result.untyped_storage().nbytes() == result.nbytes
    )


def _shares_memory(result: torch.Tensor, args: Sequence[Any]) -> bool:
    """Whether ``result`` shares the memory of an argument: ``float()`` returns a float32 tensor itself."""
    place = result.untyped_storage().data_ptr()
    return any(isinstance(arg, torch.Tensor) and arg.untyped_storage().data_ptr() == place for arg in args)
