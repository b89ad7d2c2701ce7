"""A causal language model with its cache as tensors: keys and values are inputs and outputs, layer by layer.

Names are those of the Optimum exporter: ``past_key_values.0.key`` in, ``present.0.key`` out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from bf16kit.messages.errors import UsageError
from bf16kit.numerics.tensors import TensorSpec
from converter.process.quiet import quiet
from converter.read.huggingface.inputs import BATCH, SEQ
from converter.read.huggingface.model_directory import Directory
from converter.read.torch.onnx_export import left_out, named_tensors
from converter.source import Array, Feeds

CACHE, _PAST, _TOTAL = "past_key_values", "past", "total"
_ROWS, _SEQ_RANGE, _PAST_RANGE = 2, (1, 17), (4, 33)  # the upper ends are excluded


class Cache:
    """The cache of ``module``, found by running it on three tokens.

    ``specs`` are its tensors, ``spreads`` the standard deviations of their values, by layer and part. ``left_out``
    names what else the model computes and does not serve. Raises :class:`UsageError` for a model that is not a causal
    language model, or whose cache is not just keys and values.
    """

    def __init__(self, module: Any) -> None:
        name = type(module).__name__
        if not is_causal(module):
            raise UsageError(f"--with-past: {name} is not a causal language model; leave the option out")
        with quiet(), torch.no_grad():
            output = module(input_ids=torch.ones((1, 3), dtype=torch.int64), use_cache=True, return_dict=True)
        layers = getattr(output.get(CACHE), "layers", ())
        tensors = {f"{CACHE}.{n}.{part}": t for n, layer in enumerate(layers) for part, t in _keys_and_values(layer)}
        if not tensors or not all(isinstance(t, torch.Tensor) and t.shape[2:3] == (3,) for t in tensors.values()):
            raise UsageError(f"--with-past: {name} keeps more than keys and values; leave the option out")
        self.specs = tuple(
            TensorSpec(name, "float32", (BATCH, tensor.shape[1], _PAST, tensor.shape[3]))
            for name, tensor in tensors.items()
        )
        self.spreads = [float(tensor.std()) for tensor in tensors.values()]
        self.left_out = tuple(name for name in left_out(output) if name != CACHE)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs of the model: new tokens, the mask over past and new tokens, the cache."""
        tokens = TensorSpec("input_ids", "int64", (BATCH, SEQ)), TensorSpec("attention_mask", "int64", (BATCH, _TOTAL))
        return (*tokens, *self.specs)

    def call(self, module: Any, feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run ``module`` on the new tokens; a token's position is the number of unmasked tokens before it."""
        from transformers import DynamicCache

        ids, mask = feeds["input_ids"], feeds["attention_mask"]
        tensors = [feeds[spec.name] for spec in self.specs]
        extra = {}
        if "position_ids" in inspect.signature(module.forward).parameters:
            extra["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        # Without the config, a layer with a sliding window is only masked, and still keeps the whole past.
        cache = DynamicCache(list(zip(tensors[::2], tensors[1::2], strict=True)))
        given = {"input_ids": ids, "attention_mask": mask, CACHE: cache, **extra}
        output = module(**given, use_cache=True, return_dict=True)
        outputs = dict(named_tensors(output))
        for index, layer in enumerate(output.past_key_values.layers):
            outputs |= {f"present.{index}.{part}": tensor for part, tensor in _keys_and_values(layer)}
        return outputs

    def samples(self, directory: Directory, seed: int, count: int) -> Iterator[Feeds]:
        """Yield feeds in the middle of a text; the second row starts later and is padded at the left."""
        random = np.random.default_rng(seed)
        for _ in range(count):
            new, past = int(random.integers(*_SEQ_RANGE)), int(random.integers(*_PAST_RANGE))
            mask = np.ones((_ROWS, past + new), np.int64)
            mask[1:, : random.integers(0, past)] = 0
            ids = random.integers(0, directory.number("vocab_size", 2), (_ROWS, new))
            feed: Feeds = {"input_ids": ids, "attention_mask": mask}
            for spec, spread in zip(self.specs, self.spreads, strict=True):
                sizes = (_ROWS, spec.shape[1], past, spec.shape[3])
                values: Array = random.standard_normal(tuple(map(int, sizes))) * spread
                feed[spec.name] = values.astype(np.float32)
            yield feed


def is_causal(module: Any) -> bool:
    """Return whether ``module`` takes a cache and has no encoder."""
    takes = CACHE in inspect.signature(module.forward).parameters
    return takes and not getattr(module.config, "is_encoder_decoder", False)


def _keys_and_values(layer: Any) -> list[tuple[str, Any]]:
    return [("key", getattr(layer, "keys", None)), ("value", getattr(layer, "values", None))]
