"""torch modules that compute the same as the Flax models of ``tests/sources/jaxmodels.py``, with other weight names."""

import torch
from torch import nn
from torch.nn import functional


class Cnn(nn.Module):
    """x [batch, 3, 12, 12] → logits."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(16)])
        self.hidden = nn.Linear(16, 32)
        self.classes = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return {"logits": self.classes(torch.relu(self.hidden(x.mean((2, 3)))))}


class Block(nn.Module):
    """ids [batch, seq] → hidden [batch, seq, 16], with Flax's epsilon and gelu."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(32, 16)
        self.norm_1, self.norm_2 = nn.LayerNorm(16, eps=1e-6), nn.LayerNorm(16, eps=1e-6)
        self.attn = nn.ModuleDict({f"{name}_proj": nn.Linear(16, 16) for name in ("q", "k", "v", "o")})
        self.fc_up, self.fc_down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.token_embedding(ids)
        y = self.norm_1(x)
        heads = [self.attn[f"{name}_proj"](y).unflatten(-1, (4, 4)).transpose(1, 2) for name in ("q", "k", "v")]
        mixed = functional.scaled_dot_product_attention(*heads)
        x = x + self.attn["o_proj"](mixed.transpose(1, 2).flatten(2))
        y = functional.gelu(self.fc_up(self.norm_2(x)), approximate="tanh")
        return {"hidden": x + self.fc_down(y)}


class Mlp(nn.Module):
    """x [batch, 16] → output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn, self.last = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.relu(self.bn(self.first(x))))
        return result
