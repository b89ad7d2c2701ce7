"""Large torch tensors in temporary files: a module is as large as its checkpoint, and would be in memory beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bf16kit.runtime.scratch import NoScratch, scratch_file

_LARGE = 1 << 20  # bytes; what is smaller stays in memory
_UNFILLED = (torch.empty, torch.empty_like)
# What gives a tensor of its own memory. Not those that look at memory of others, as from_numpy does: a later write to
# that memory would not reach the tensor.
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
    """Within this context, in its thread, tensors of 1 MiB and more that are made get files in ``directory`` for
    memory; a file has no name, and is gone with its tensor.

    Nothing else is different: values, strides and what random generators give next are those of torch. Where no file
    can be had (the directory lies in memory, the disk is full), a tensor stays where it is.
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
        if func not in _MAKERS or not _fills_its_memory(result) or _is_of(result, args):
            return result
        return self._moved(result, filled=func not in _UNFILLED)

    def _moved(self, tensor: torch.Tensor, *, filled: bool) -> torch.Tensor:
        try:
            with scratch_file(tensor.nbytes, self._directory) as (path, _):
                file = torch.from_file(str(path), shared=True, size=tensor.nbytes, dtype=torch.uint8)
        except NoScratch:
            return tensor
        moved = torch.empty(0, dtype=tensor.dtype).set_(file.untyped_storage(), 0, tensor.size(), tensor.stride())
        if filled:
            moved.copy_(tensor.detach())
        return moved.requires_grad_(tensor.requires_grad)


def _fills_its_memory(result: Any) -> bool:
    """Whether ``result`` is a large plain tensor on the CPU, a leaf, that no other tensor is a part of."""
    return (
        type(result) is torch.Tensor
        and result.device.type == "cpu"
        and result.layout is torch.strided
        and result.nbytes >= _LARGE
        and result.is_leaf
        and result.untyped_storage().nbytes() == result.nbytes
    )


def _is_of(result: torch.Tensor, args: Sequence[Any]) -> bool:
    """Whether ``result`` lies in the memory of an argument: ``float()`` gives what is float32 back."""
    place = result.untyped_storage().data_ptr()
    return any(isinstance(arg, torch.Tensor) and arg.untyped_storage().data_ptr() == place for arg in args)
