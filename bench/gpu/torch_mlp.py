"""The MLP of the GPU benchmark as a torch module.

``bf16-convert --model bench.gpu.torch_mlp:mlp`` builds it from here.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch

WIDTHS = (1024, 4096, 4096, 1024)


def mlp() -> torch.nn.Sequential:
    """Linear layers of :data:`WIDTHS` with ReLU between them; the same weights every time."""
    generator = torch.Generator().manual_seed(0)
    layers: list[torch.nn.Module] = []
    for wide, narrow in pairwise(WIDTHS):
        linear = torch.nn.Linear(wide, narrow)
        with torch.no_grad():
            linear.weight.normal_(0.0, wide**-0.5, generator=generator)
            linear.bias.normal_(generator=generator)
        layers += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1]).eval()


def save(file: Path) -> Path:
    """Write the state dict of :func:`mlp` to ``file``."""
    torch.save(mlp().state_dict(), file)
    return file
