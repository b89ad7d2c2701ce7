"""Notes and checks for checkpoints that are not fp32: what their tensors lose by the conversion to fp32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bf16kit.messages.errors import SourceError
from bf16kit.messages.wording import quoted
from converter.source import Array

_LARGEST = float(np.finfo(np.float32).max)
_ROWS_BYTES = 1 << 24


def notes(tensors: Mapping[str, Array], *, residual: bool) -> tuple[str, ...]:
    """Return a sentence for each precision among ``tensors`` that loses something; bf16 loses nothing."""
    halves, doubles = _count(tensors, "float16"), _count(tensors, "float64")
    found = []
    if halves:
        kept = "the residual keeps the other three, so restore gives back fp16 bit for bit"
        lost = "the other three are not kept"
        found.append(
            f"{halves} of the checkpoint's tensors are fp16: bf16 has 8 of their 11 bits, {kept if residual else lost}"
        )
    if doubles:
        found.append(
            f"{doubles} of the checkpoint's tensors are fp64: the model computes in fp32, and restore gives fp32 for"
            " tensors that the model uses; their fp64 precision is lost"
        )
    return tuple(found)


def _count(tensors: Mapping[str, Array], dtype: str) -> int:
    return sum(tensor.dtype.name == dtype for tensor in tensors.values())


def check_range(path: Path, tensors: Mapping[str, Array]) -> None:
    """Raise :class:`SourceError` naming the first fp64 tensor with a number that fp32 cannot hold."""
    for name, tensor in tensors.items():
        if tensor.dtype == np.float64 and not _fits(tensor.reshape(-1)):
            raise SourceError(
                f"{path}: tensor {quoted(name)} is fp64 and holds a number above fp32's largest, {_LARGEST:.4g},"
                " which would become infinity in the model"
            )


def _fits(flat: Array) -> bool:
    step = _ROWS_BYTES // flat.itemsize
    for start in range(0, flat.size, step):
        block = np.abs(flat[start : start + step])
        if bool(np.any((block > _LARGEST) & np.isfinite(block))):
            return False
    return True
