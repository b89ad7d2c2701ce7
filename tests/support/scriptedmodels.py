"""TorchScript files of small modules: scripted, traced and frozen."""

import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from architectures import seeded
from torch import nn

How = Literal["scripted", "traced", "frozen"]


class Encoder(nn.Module):
    """ids [batch, seq] → logits [batch, seq, 5]: an embedding, and a transformer layer, which has many branches."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layer(self.table(ids)))
        return result


class Looping(nn.Module):
    """x [batch, 16] → the same layer three times, in a loop that appends to a list → the sum over the list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.times = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [x]
        for index in range(self.times):
            found.append(torch.relu(self.layer(found[index])) * (index + 1))
        width = x.size(1)
        return torch.cat(found, 1).view(len(x), -1, width).sum(1)


class Deciding(nn.Module):
    """x [batch, 16] → a branch that depends on the values of x. The converter's ONNX graphs cannot follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            x = -x
        result: torch.Tensor = self.layer(x)
        return result


class Counted(nn.Module):
    """x [batch, 16], count [batch], each at least 1 → a product of x."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        if bool((count < 1).any()):
            raise ValueError("nothing to count")
        result: torch.Tensor = self.layer(x)
        return result


class Reflected(nn.Module):
    """x [batch, 16] → a product with a weight that is orthogonal by construction. ONNX has no operator for that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.axes = nn.Linear(8, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.linalg.householder_product(self.axes.weight, torch.full((8,), 0.5))
        result: torch.Tensor = self.layer(x) + (x @ turned).sum(1, keepdim=True)
        return result


class Stepwise(nn.Module):
    """x [batch, seq, 16] → a layer applied step by step. A trace or export has a fixed number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            state = torch.tanh(self.layer(state) + step)
        return state


class Recurrent(nn.Module):
    """x [batch, seq, 16] → an LSTM → a linear layer with three outputs for every state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(16, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.layer(x)
        result: torch.Tensor = self.head(states)
        return result


class Named(nn.Module):
    """Two inputs → a mapping of two outputs. It has a shared weight, and a tensor that is no parameter or buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)
        self.right.weight = self.left.weight
        self.shift = torch.linspace(-1, 1, 16)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.left(a) + self.right(b), "embedding": torch.tanh(self.left(a) + self.shift)}


def scripted(module: nn.Module, example: Any, how: How) -> Any:
    """Return ``module``, with seeded weights, as TorchScript."""
    seeded(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has deprecated TorchScript
        if how == "traced":
            return torch.jit.trace(module, example, strict=False, check_trace=False)  # type: ignore[no-untyped-call]
        made = torch.jit.script(module)
        return torch.jit.freeze(made) if how == "frozen" else made


def save(path: Path, module: nn.Module, example: Any, how: How = "scripted") -> Path:
    made = scripted(module, example, how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(made, path)
    return path
