"""A module behind positional tensors and a flat tuple: the one calling convention that every exporter understands."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bf16kit.errors import ConversionError

# Of a Hugging Face model's outputs, the one that it is used for; the rest (pooler, caches, attentions) is left out.
_PREFERRED = ("logits", "last_hidden_state")


class Positional(torch.nn.Module):
    """Calls ``module`` by keyword when its ``forward`` has parameters of all the ``names``, else by position."""

    def __init__(self, module: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self.names = list(names)
        self.by_keyword = set(names) <= set(inspect.signature(module.forward).parameters)

    def call(self, *tensors: torch.Tensor) -> Any:
        """Whatever ``module`` returns."""
        if self.by_keyword:
            return self.module(**dict(zip(self.names, tensors, strict=True)))
        return self.module(*tensors)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for _, tensor in _named(self.call(*tensors)))


def output_names(result: Any) -> tuple[str, ...]:
    """Names for what a module returned: a mapping's keys, ``output`` for one tensor, ``output_0`` … for several."""
    names = tuple(name for name, _ in _named(result))
    if not names:
        raise ConversionError(f"the model returned {type(result).__name__} without a tensor in it")
    return names


def _named(result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(result, torch.Tensor):
        yield "output", result
    elif isinstance(result, Mapping):
        preferred = [key for key in _PREFERRED if key in result][:1]
        for key in preferred or list(result):
            if isinstance(result[key], torch.Tensor):
                yield str(key), result[key]
    elif isinstance(result, tuple | list):
        yield from _positions(result)


def _positions(result: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = [item for item in result if isinstance(item, torch.Tensor)]
    if len(tensors) == 1:
        yield "output", tensors[0]
        return
    for index, tensor in enumerate(tensors):
        yield f"output_{index}", tensor
