"""The sources of the artifacts in this directory: ``python sources.py DIRECTORY`` writes them, with seeded weights."""

import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from torch import nn

RULES = """rules:
- {match: first.weight, to: up.weight, steps: [{transpose: [1, 0]}]}
- {match: first.bias, to: up.bias}
- {match: (down.*), to: \\1}
"""


class Mlp(nn.Module):
    """x [batch, 24] → logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 72), nn.Linear(72, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)))
        return result


class Cnn(nn.Module):
    """image [batch, 3, 8, 8] → logits [batch, 10]. Its BatchNorms fold into the convolutions, and count in int64."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(16, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.features(image).mean((2, 3)))
        return result


class Convolutions(nn.Module):
    """image [batch, 3, 8, 8] → logits [batch, 10]. The kernel computes the second and the third convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(n, 32, 3, padding=1) for n in (3, 32, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(image))))
        result: torch.Tensor = self.head(torch.relu(self.third(hidden)).mean((2, 3)))
        return result


class Transformer(nn.Module):
    """ids [batch, seq] → scores [batch, seq, 40] by the embedding's own table, and embedding [batch, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 32)
        self.query, self.key, self.value, self.mix = (nn.Linear(32, 32) for _ in range(4))
        self.before, self.after = nn.LayerNorm(32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.table(ids)
        seen = self.before(hidden)
        query, key, value = (
            part(seen).unflatten(-1, (2, 16)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.mix(mixed.transpose(1, 2).flatten(2))
        hidden = self.after(hidden + self.down(nn.functional.gelu(self.up(hidden))))
        return {"scores": hidden @ self.table.weight.T, "embedding": hidden.mean(1)}


def weights(module: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the state dict of ``module`` with seeded weights, of magnitudes as after training."""
    rng, state = np.random.default_rng(seed), {}
    for name, tensor in module.state_dict().items():
        shape = tuple(tensor.shape)
        if name.endswith("num_batches_tracked"):
            values: Any = np.int64(1234567890123)
        elif name.endswith("running_var"):
            values = (rng.random(shape) + 0.5).astype(np.float32)
        else:
            fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 4
            values = (rng.standard_normal(shape) / fan_in**0.5).astype(np.float32)
        state[name] = torch.as_tensor(values)
    return state


def lstm() -> onnx.ModelProto:
    """x [seq, batch, 8] → an LSTM of 16 → y [batch, 4] of its last state."""
    rng = np.random.default_rng(1)
    shapes = {"w": (1, 64, 8), "r": (1, 64, 16), "b": (1, 128), "head": (16, 4)}
    held = [numpy_helper.from_array((rng.standard_normal(s) / 4).astype(np.float32), n) for n, s in shapes.items()]
    held.append(numpy_helper.from_array(np.array([0], np.int64), "first"))
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r", "b"], ["", "last"], name="lstm", hidden_size=16),
        helper.make_node("Squeeze", ["last", "first"], ["state"], name="state"),
        helper.make_node("MatMul", ["state", "head"], ["y"], name="head"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["seq", "batch", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])
    graph = helper.make_graph(nodes, "lstm", [x], [y], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def batches() -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yield what the recovered models were trained on: 8 batches of x fp32 [16, 24]."""
    rng = np.random.default_rng(3)
    for _ in range(8):
        yield {"x": rng.standard_normal((16, 24)).astype(np.float32)}


def write(directory: Path) -> None:
    """Write every source to ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, module in (
        ("mlp", Mlp()),
        ("cnn", Cnn()),
        ("convolutions", Convolutions()),
        ("transformer", Transformer()),
    ):
        torch.save(weights(module), directory / f"{name}.pt")
    renamed = {name.replace("up", "first"): tensor for name, tensor in weights(Mlp(), seed=4).items()}
    renamed["first.weight"] = renamed["first.weight"].T.contiguous()
    save_file(renamed, directory / "renamed.safetensors")
    (directory / "rules.yaml").write_text(RULES, "utf-8")
    half = {name: tensor.half() for name, tensor in weights(Mlp(), seed=2).items()}
    save_file(half, directory / "half.safetensors")
    onnx.save(lstm(), directory / "lstm.onnx")
    np.savez(directory / "samples.npz", **next(batches()))  # type: ignore[arg-type]  # numpy's stub takes one for a flag


def digest(tensors: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Return the sha256 of a checkpoint: each tensor's name, dtype, shape and bytes, in the order of the names."""
    found = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        found.update(f"{name} {array.dtype} {array.shape}\n".encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
