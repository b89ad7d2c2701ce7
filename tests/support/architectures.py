"""Small torch modules for tests of the converter; each is the smallest module with one property.

The option ``--model architectures:Mlp`` finds them because pytest has this directory on its path.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn


class Mlp(nn.Module):
    """x [batch, width] → logits [batch, classes]."""

    def __init__(self, width: int = 16, hidden: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)))
        return result


class Cnn(nn.Module):
    """x [batch, 3, 16, 16] → two convolutions, each with a BatchNorm (it counts batches in int64) → 10 classes."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride=2),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.features(x).mean((2, 3)))
        return result


class Windows(nn.Module):
    """x [batch, 1, time] → [batch, 4]. Needs 400 steps, as a network of speech does."""

    def __init__(self) -> None:
        super().__init__()
        self.window = nn.Conv1d(1, 4, 400, stride=160)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.window(x)).mean(-1)


class Widening(nn.Module):
    """x [batch, 16] of any dtype → [batch, 48]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x.float())
        return result


class Tied(nn.Module):
    """ids [batch, seq] → [batch, seq, 64]. The embedding table is also the output layer, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16)
        self.inner = nn.Linear(16, 16)
        self.out = nn.Linear(16, 64, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(torch.tanh(self.inner(self.table(ids))))
        return result


class Centred(Mlp):
    """Subtracts the mean of the batch from every row, so that the output of a row depends on the other rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


class Several(nn.Module):
    """Takes two inputs and returns a mapping of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(8, 16)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.left(a) + self.right(b), "embedding": torch.tanh(self.left(a))}


class ModelOutput(dict[str, Any]):
    """The converter recognises the outputs of transformers' models by this class name."""


class Untraceable(Mlp):
    """Branches on its data, which no export can trace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if bool(x.sum() > 0) else x


def with_buffers(buffers: dict[str, tuple[str, list[int]]]) -> nn.Module:
    """Return an :class:`Mlp` that also has buffers of these names, dtypes and shapes, and does not use them."""
    module = Mlp()
    for name, (dtype, shape) in buffers.items():
        module.register_buffer(name, torch.zeros(shape, dtype=getattr(torch, dtype)))
    return module


def failing() -> nn.Module:
    raise RuntimeError("no such preset")


def not_a_module() -> str:
    return "a string"


NUMBER = 7


def seeded(module: nn.Module, seed: int = 0) -> nn.Module:
    """Set seeded weights, and running statistics like those after training. Return ``module`` in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if name.endswith("num_batches_tracked"):
                tensor.fill_(1234567890123)
            elif name.endswith("running_var"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            else:
                fan_in = tensor[0].numel() if tensor.ndim > 1 else 4
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / fan_in**0.5)
    return module.eval()


def save(path: Path, module: nn.Module, **changed: torch.Tensor) -> Path:
    """Write the state dict of ``module`` with seeded weights to ``path``, and return ``path``.

    ``changed`` replaces tensors; ``__`` in a name stands for a dot.
    """
    state: dict[str, Any] = dict(seeded(module).state_dict())
    state |= {name.replace("__", "."): tensor for name, tensor in changed.items()}
    torch.save(state, path)
    return path


class Counting(nn.Module):
    """A module that changes its own buffer."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + self.count
