"""scikit-learn's digits, 8 × 8 pixels of 17 levels, and two small nets trained on them: a CNN and a transformer.

They read what a sensor gives: a black level of ``OFFSET`` counts under 16 counts of signal. The nets were trained on
normalised pixels, and the normalisation is folded into the first layer, as deployed nets have it. There bf16 costs
something: what rounding a weight of that layer loses is multiplied by the black level.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

OFFSET = float(os.environ.get("BF16KIT_DIGITS_OFFSET", "256"))
_LEVELS, _TRAINED, _BATCH = 16.0, 1200, 64

Arrays = dict[str, NDArray[Any]]


class Cnn(nn.Module):
    """image [batch, 1, 8, 8] → three convolutions, BatchNorm behind the later two → 10 logits."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels, 3)
        self.features = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * channels, 10)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.features(self.first(image)).mean((2, 3)))}


class Transformer(nn.Module):
    """image [batch, 1, 8, 8] → its rows are eight tokens → two pre-norm layers → 10 logits."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.positions = nn.Parameter(torch.zeros(8, width))
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(image[:, 0]) + self.positions
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.norm(x).mean(1))}


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.before(x)).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width))
        found: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.after(x))))
        return found


MODELS = {"cnn": Cnn, "transformer": Transformer}


def train(name: str, path: Path, epochs: int = 20) -> None:
    """Train ``name`` on normalised pixels, fold the normalisation into its first layer, and save its state dict."""
    torch.manual_seed(0)
    np.random.seed(0)
    module = MODELS[name]()
    optimiser = torch.optim.AdamW(module.parameters(), 3e-3 if name == "cnn" else 1e-3)
    for _ in range(epochs):
        for image, labels in _batches(*_split()[0], shuffled=True):
            loss = nn.functional.cross_entropy(
                module(torch.from_numpy(_normal(image)))["logits"], torch.from_numpy(labels)
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    first = module.first
    assert isinstance(first, nn.Conv2d | nn.Linear)
    assert first.bias is not None
    with torch.no_grad():
        first.weight.div_(_LEVELS)
        first.bias.sub_((OFFSET * first.weight).flatten(1).sum(1))
    torch.save(module.eval().state_dict(), path)


def _normal(image: NDArray[np.float32]) -> NDArray[np.float32]:
    return (image - np.float32(OFFSET)) / np.float32(_LEVELS)


def shuffled() -> Iterator[tuple[Arrays, NDArray[np.int64]]]:
    """A pass over the 1,200 images to train on, in an order drawn anew, with their labels."""
    for image, labels in _batches(*_split()[0], shuffled=True):
        yield {"image": image}, labels


def held_out() -> Iterator[tuple[Arrays, NDArray[np.int64]]]:
    """The 597 others, in their order."""
    for image, labels in _batches(*_split()[1], shuffled=False):
        yield {"image": image}, labels


_Pair = tuple[NDArray[np.float32], NDArray[np.int64]]


def _split() -> tuple[_Pair, _Pair]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[:, None] + OFFSET).astype(np.float32)
    labels = digits.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(images))
    ours, others = order[:_TRAINED], order[_TRAINED:]
    return (images[ours], labels[ours]), (images[others], labels[others])


def _batches(images: NDArray[np.float32], labels: NDArray[np.int64], *, shuffled: bool) -> Iterator[_Pair]:
    order = np.random.permutation(len(images)) if shuffled else np.arange(len(images))
    for start in range(0, len(images) - (_BATCH - 1) * shuffled, _BATCH):
        chosen = order[start : start + _BATCH]
        yield images[chosen], labels[chosen]


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
