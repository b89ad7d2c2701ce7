"""A model that loses much accuracy in bf16, and data loaders for its recovery.

``--model recovering:Shifted`` names the model, ``--data recovering:NAME`` one of the loaders.
"""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from architectures import Mlp, seeded
from numpy.typing import NDArray
from torch import nn

WIDTH = 16
LEVEL = 32.0
Arrays = dict[str, NDArray[Any]]


class Shifted(Mlp):
    """x [batch, 16], around :data:`LEVEL` → logits [batch, 10]."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = self.down(torch.relu(self.up(x)))
        return {"logits": logits}


def shifted() -> nn.Module:
    """Return :class:`Shifted` with weights whose first bias subtracts the level, as if a normalisation were folded in.

    The level multiplies the rounding error of each weight; training can correct the bias by that amount.
    """
    module = seeded(Shifted(), 3)
    with torch.no_grad():
        module.get_parameter("up.bias").sub_(LEVEL * module.get_parameter("up.weight").sum(1))
    return module


def _inputs(seed: int, count: int) -> Iterator[NDArray[np.float32]]:
    generator = np.random.default_rng(seed)
    for _ in range(count):
        yield (LEVEL + generator.standard_normal((32, WIDTH))).astype(np.float32)


def unlabelled() -> Iterator[Arrays]:
    for x in _inputs(0, 8):
        yield {"x": x}


def shuffled() -> Iterator[Arrays]:
    """Yield a pass of eight batches from numpy's global generator, like the loaders of many users."""
    for _ in range(8):
        yield {"x": (LEVEL + np.random.standard_normal((32, WIDTH))).astype(np.float32)}


def held_out() -> Iterator[Arrays]:
    for x in _inputs(1, 4):
        yield {"x": x}


def nothing() -> Iterator[Arrays]:
    return iter(())


def once() -> Iterator[Arrays]:
    return _ONCE  # exhausted after the first pass


_ONCE = iter([{"x": np.ones((4, WIDTH), np.float32)}])


def wide() -> Iterator[Arrays]:
    yield {"x": np.ones((4, WIDTH + 1), np.float32)}


def empty() -> Iterator[Arrays]:
    yield {"x": np.ones((0, WIDTH), np.float32)}


def three() -> Iterator[Any]:
    x = np.ones((4, WIDTH), np.float32)
    yield x, x, x


def failing() -> Iterator[Arrays]:
    yield {"x": np.ones((4, WIDTH), np.float32)}
    raise RuntimeError("the disk went away")


def exits() -> Iterator[Arrays]:
    yield {"x": np.ones((4, WIDTH), np.float32)}
    sys.exit("no more data")


class _Failing(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("the disk went away")


def failing_worker() -> Any:
    return torch.utils.data.DataLoader(_Failing(), num_workers=1)


def no_numbers() -> Iterator[Arrays]:
    x = np.ones((4, WIDTH), np.float32)
    yield {"x": x}
    x = x.copy()
    x[2, 5:7] = np.nan
    yield {"x": x}


def infinite() -> Iterator[Arrays]:
    yield {"x": np.full((4, WIDTH), 3e38, np.float32)}  # the sums overflow fp32


def large() -> Iterator[Arrays]:
    yield {"x": np.full((4, WIDTH), 1e6, np.float32)}  # overflows fp16


def scattered() -> Iterator[Arrays]:
    for x in _inputs(2, 4):
        yield {"x": x - np.float32(LEVEL)}


def images() -> Iterator[Arrays]:
    generator = np.random.default_rng(3)
    for _ in range(8):
        yield {"x": (2 + generator.standard_normal((8, 3, 16, 16))).astype(np.float32)}


def ids() -> Iterator[Arrays]:
    generator = np.random.default_rng(4)
    for _ in range(8):
        yield {"ids": generator.integers(0, 64, (8, 5))}
