"""The language model of the kernel's benchmark: two LLaMA layers of width 1024, one token a step.

``bf16-convert --model bench.kernel.torch_lm:step`` builds it from here. Weights are random and seeded: timing does
not depend on what they say. The vocabulary's 32000 rows are more than half of the weights, as in small language models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

LAYERS, WIDTH, HEADS, HIDDEN, VOCABULARY = 2, 1024, 16, 2816, 32000
HEAD = WIDTH // HEADS


class Step(torch.nn.Module):
    """Token ids int64 [batch, 1] and, per layer, past keys and values [batch, heads, past, head] → logits
    [batch, 1, vocabulary] and the keys and values with this token's appended."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            tie_word_embeddings=tied,
        )
        config._attn_implementation = "eager"  # plain MatMul and Softmax, as the converter loads models
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.lm = LlamaForCausalLM(config)

    def forward(
        self,
        input_ids: torch.Tensor,
        key_0: torch.Tensor,
        value_0: torch.Tensor,
        key_1: torch.Tensor,
        value_1: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        cache = DynamicCache([(key_0, value_0), (key_1, value_1)])
        out = self.lm(input_ids=input_ids, past_key_values=cache, use_cache=True)
        present: dict[str, torch.Tensor] = {}
        layers: list[Any] = cache.layers
        for index, layer in enumerate(layers):
            present |= {f"present_key_{index}": layer.keys, f"present_value_{index}": layer.values}
        return {"logits": out.logits, **present}


def step(*, tied: bool = False) -> Step:
    """The model in evaluation mode; the same weights every time."""
    return Step(tied=tied).eval()


def save(file: Path, *, tied: bool) -> Path:
    """Write the state dict of :func:`step` to ``file``."""
    torch.save(step(tied=tied).state_dict(), file)
    return file


def inputs() -> list[str]:
    """The inputs as ``bf16-convert --input`` takes them."""
    past = f"float32:batch,{HEADS},past,{HEAD}"
    names = [f"{kind}_{layer}" for layer in range(LAYERS) for kind in ("key", "value")]
    return ["input_ids:int64:batch,1", *(f"{name}:{past}" for name in names)]


def feeds(past: int) -> dict[str, NDArray[Any]]:
    """One row with ``past`` tokens before it."""
    generator = np.random.default_rng(0)
    shape = (1, HEADS, past, HEAD)
    found: dict[str, NDArray[Any]] = {"input_ids": generator.integers(0, VOCABULARY, (1, 1))}
    for layer in range(LAYERS):
        found |= {f"{kind}_{layer}": generator.standard_normal(shape, np.float32) for kind in ("key", "value")}
    return found
