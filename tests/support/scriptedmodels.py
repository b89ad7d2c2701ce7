"""TorchScript files of small modules, scripted, traced and frozen: each has what one of the three makes of a module."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from architectures import seeded
from torch import nn

How = Literal["scripted", "traced", "frozen"]


class Encoder(nn.Module):
    """ids [batch, seq] → logits [batch, seq, 5]: an embedding, and a transformer layer with its many branches."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layer(self.table(ids)))
        return result


class Looping(nn.Module):
    """x [batch, 16] → a layer three times, and a sum over what a list was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.times = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [x]
        for index in range(self.times):
            found.append(torch.relu(self.layer(found[index])) * (index + 1))
        rows, width = x.shape
        return torch.cat(found, 1).view(rows, -1, width).sum(1)


class Deciding(nn.Module):
    """x [batch, 16] → branches on its data, which no ONNX graph made here follows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            x = -x
        result: torch.Tensor = self.layer(x)
        return result


class Reflected(nn.Module):
    """x [batch, 16] → a product with a weight that is orthogonal by construction, which ONNX has no operator for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.axes = nn.Linear(8, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.linalg.householder_product(self.axes.weight, torch.full((8,), 0.5))
        result: torch.Tensor = self.layer(x) + (x @ turned).sum(1, keepdim=True)
        return result


class Recurrent(nn.Module):
    """x [batch, seq, 16] → an LSTM, of which every state's first three numbers come."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(16, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.layer(x)
        result: torch.Tensor = self.head(states)
        return result


class Named(nn.Module):
    """Two inputs → a mapping of two outputs; a tensor that is neither parameter nor buffer, and a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)
        self.right.weight = self.left.weight
        self.shift = torch.linspace(-1, 1, 16)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.left(a) + self.right(b), "embedding": torch.tanh(self.left(a) + self.shift)}


def scripted(module: nn.Module, example: Any, how: How) -> Any:
    """``module`` with seeded weights as TorchScript."""
    seeded(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates what these tests are about
        if how == "traced":
            return torch.jit.trace(module, example, strict=False, check_trace=False)  # type: ignore[no-untyped-call]
        made = torch.jit.script(module)
        return torch.jit.freeze(made) if how == "frozen" else made


def save(path: Path, module: nn.Module, example: Any, how: How = "scripted") -> Path:
    """The file of :func:`scripted`."""
    made = scripted(module, example, how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(made, path)
    return path
