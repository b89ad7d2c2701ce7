"""Checkpoints of gigabytes for torch modules: a stack of linear layers, which ``--model`` names, and a directory that
transformers knows. Their weights are written block by block, so that making one needs no memory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

WIDTH = 4096
_LAYERS, _QUICK_LAYERS = 24, 2  # 67 MB each
_BLOCK_ROWS = 256
_LLAMA: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,  # three products of 67 MB a layer, and four of 17 MB
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 8192,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "architectures": ["LlamaForCausalLM"],
}
_LLAMA_LAYERS, _LLAMA_QUICK_LAYERS = 5, 1


def stack(layers: int) -> torch.nn.Sequential:
    """Linear layers of :data:`WIDTH` with ReLU after each, for ``--model``; x [batch, WIDTH]."""
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    return torch.nn.Sequential(*parts)


def write_stack(path: Path, *, quick: bool) -> tuple[int, list[str]]:
    """Write a checkpoint for :func:`stack` to ``path``; its bytes, and the options to convert it with."""
    layers = _QUICK_LAYERS if quick else _LAYERS
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        shapes |= {f"{2 * layer}.weight": (WIDTH, WIDTH), f"{2 * layer}.bias": (WIDTH,)}
    options = ["--model", "bench.conversion.large_torch:stack", "--model-args", json.dumps({"layers": layers})]
    return _write(path, shapes), [*options, "--input", f"x:float32:batch,{WIDTH}"]


def write_directory(path: Path, *, quick: bool) -> tuple[int, list[str]]:
    """The same for the directory ``path`` of a causal language model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_LLAMA, num_hidden_layers=_LLAMA_QUICK_LAYERS if quick else _LLAMA_LAYERS)
    config.save_pretrained(path)
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    return _write(path / "model.safetensors", shapes), []


def _write(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """A safetensors file of seeded fp32 tensors, matrices scaled to keep their input's size; the bytes of all."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            width = shape[1] if len(shape) > 1 else 1
            for row in range(0, shape[0], _BLOCK_ROWS):
                rows = min(_BLOCK_ROWS, shape[0] - row)
                block = np.ones(rows, np.float32) if "norm" in name else random.standard_normal((rows, width), "f4")
                file.write((block / np.float32(width**0.5)).astype(np.float32).tobytes())
    return end
