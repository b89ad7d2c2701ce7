"""A causal language model with its cache as tensors: keys and values are inputs and outputs, layer by layer.

Names are those of the Optimum exporter: ``past_key_values.0.key`` in, ``present.0.key`` out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bf16kit.messages.errors import UsageError
from bf16kit.numerics.tensors import TensorSpec
from converter.process.quiet import quiet
from converter.read.huggingface.directory import Directory
from converter.read.huggingface.inputs import BATCH, SEQ
from converter.read.huggingface.samples import vocabulary
from converter.read.torch.positional import named_tensors
from converter.source import Array, Feeds, Sampler

PAST, TOTAL = "past", "total"
_PARTS = ("key", "value")
_ROWS, _SEQ_RANGE, _PAST_RANGE = 2, (1, 17), (4, 33)  # the upper ends are excluded


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache of a model: per layer and part, the tensor's spec and the standard deviation of its values."""

    specs: tuple[TensorSpec, ...]
    spreads: tuple[float, ...]

    @classmethod
    def of(cls, module: Any) -> Cache:
        """Return the cache of ``module``, found by running it on three tokens.

        Raises :class:`UsageError` for a model that is not a causal language model, or whose cache is not just keys and
        values.
        """
        name = type(module).__name__
        if not is_causal(module):
            raise UsageError(f"--with-past: {name} is not a causal language model; leave the option out")
        with quiet(), torch.no_grad():
            ids = torch.ones((1, 3), dtype=torch.int64)
            layers = module(input_ids=ids, use_cache=True, return_dict=True).get("past_key_values")
        tensors = [tensor for layer in getattr(layers, "layers", ()) for tensor in _keys_and_values(layer)]
        if not tensors or not all(isinstance(t, torch.Tensor) and t.ndim == 4 and t.shape[2] == 3 for t in tensors):
            raise UsageError(f"--with-past: {name} keeps more than keys and values; leave the option out")
        names = [f"past_key_values.{index // 2}.{_PARTS[index % 2]}" for index in range(len(tensors))]
        specs = [
            TensorSpec(spec, "float32", (BATCH, tensor.shape[1], PAST, tensor.shape[3]))
            for spec, tensor in zip(names, tensors, strict=True)
        ]
        return cls(tuple(specs), tuple(float(tensor.std()) for tensor in tensors))

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return all inputs of the model: new tokens, the mask over past and new tokens, the cache."""
        tokens = (TensorSpec("input_ids", "int64", (BATCH, SEQ)), TensorSpec("attention_mask", "int64", (BATCH, TOTAL)))
        return (*tokens, *self.specs)

    def call(self, module: Any, feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run ``module`` on the new tokens; a token's position is the number of unmasked tokens before it."""
        from transformers import DynamicCache

        ids, mask = feeds["input_ids"], feeds["attention_mask"]
        cache_tensors = [feeds[spec.name] for spec in self.specs]
        extra = {}
        if "position_ids" in inspect.signature(module.forward).parameters:
            extra["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        # Without the config, a layer with a sliding window is only masked, and still keeps the whole past.
        cache = DynamicCache(list(zip(cache_tensors[::2], cache_tensors[1::2], strict=True)))
        output = module(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, return_dict=True, **extra
        )
        outputs = dict(named_tensors(output))
        for index, layer in enumerate(output.past_key_values.layers):
            for part, tensor in zip(_PARTS, _keys_and_values(layer), strict=True):
                outputs[f"present.{index}.{part}"] = tensor
        return outputs

    def sampler(self, directory: Directory, inputs: Sequence[TensorSpec]) -> Sampler:
        """Return a sampler of feeds in the middle of a text; the second row starts later and is padded at the left."""

        def sample(seed: int, count: int) -> Iterator[Feeds]:
            random = np.random.default_rng(seed)
            for _ in range(count):
                yield self._feed(directory, inputs, random)

        return sample

    def _feed(self, directory: Directory, inputs: Sequence[TensorSpec], random: np.random.Generator) -> Feeds:
        sizes = {BATCH: _ROWS}
        sizes[SEQ], sizes[PAST] = int(random.integers(*_SEQ_RANGE)), int(random.integers(*_PAST_RANGE))
        sizes[TOTAL] = sizes[SEQ] + sizes[PAST]
        shapes = {spec.name: tuple(d if isinstance(d, int) else sizes[d] for d in spec.shape) for spec in inputs}
        mask = np.ones(shapes["attention_mask"], np.int64)
        mask[1:, : random.integers(0, sizes[PAST])] = 0
        feed: Feeds = {
            "input_ids": random.integers(0, vocabulary(directory), shapes["input_ids"]),
            "attention_mask": mask,
        }
        for spec, spread in zip(self.specs, self.spreads, strict=True):
            values: Array = random.standard_normal(shapes[spec.name]) * spread
            feed[spec.name] = values.astype(np.float32)
        return feed


def is_causal(module: Any) -> bool:
    """Return whether ``module`` takes a cache and has no encoder."""
    takes = "past_key_values" in inspect.signature(module.forward).parameters
    return takes and not getattr(module.config, "is_encoder_decoder", False)


def _keys_and_values(layer: Any) -> tuple[Any, Any]:
    return getattr(layer, "keys", None), getattr(layer, "values", None)
