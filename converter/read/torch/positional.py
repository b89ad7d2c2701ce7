"""Wraps a module to take positional tensors and return a flat tuple, a convention that every exporter supports."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bf16kit.messages.errors import ConversionError

Call = Callable[[torch.nn.Module, dict[str, torch.Tensor]], Any]


class Positional(torch.nn.Module):
    """Calls ``module`` by keyword if its ``forward`` has parameters with all the ``names``, else by position.

    ``call`` replaces that: it gets the module and its inputs by name.
    """

    def __init__(self, module: torch.nn.Module, names: Sequence[str], call: Call | None = None) -> None:
        super().__init__()
        self.module = module
        self.names = list(names)
        self._call = call or (_by_keyword if _takes(module, names) else _by_position)

    def call(self, *tensors: torch.Tensor) -> Any:
        """Return whatever ``module`` returns."""
        return self._call(self.module, dict(zip(self.names, tensors, strict=True)))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given: list[torch.Tensor] = list(tensors)
        for _, tensor in named_tensors(self.call(*tensors)):
            # A graph has one value per tensor: a second name for an output, or an input's tensor as output, would be
            # lost.
            given.append(tensor.clone() if any(tensor is other for other in given) else tensor)
        return tuple(given[len(tensors) :])


def _takes(module: torch.nn.Module, names: Sequence[str]) -> bool:
    return set(names) <= set(inspect.signature(module.forward).parameters)


def _by_keyword(module: torch.nn.Module, feeds: dict[str, torch.Tensor]) -> Any:
    return module(**feeds)


def _by_position(module: torch.nn.Module, feeds: dict[str, torch.Tensor]) -> Any:
    return module(*feeds.values())


def output_names(result: Any, inputs: Sequence[str] = ()) -> tuple[str, ...]:
    """Return names for the tensors in a module's result, in its order.

    They are a mapping's keys or a named tuple's fields. Otherwise a single tensor is ``output`` and several are
    ``output_0`` …; nested parts are joined by dots: ``hidden.0``, ``scores.logits``. An output with the name of one of
    the ``inputs`` gets the suffix ``_out``, because names in a graph are unique. Raises :class:`ConversionError` for a
    result without tensors, and for two outputs of the same name.
    """
    names = [f"{name}_out" if name in inputs else name for name, _ in named_tensors(result)]
    if not names:
        raise ConversionError(f"the model returned {type(result).__name__} without a tensor in it")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConversionError(f"two of the model's outputs are named {twice!r}; rename a key of what forward returns")
    return tuple(names)


def left_out(result: Any) -> tuple[str, ...]:
    """Return what of a transformers output is not served: caches, lists with an entry per layer, duplicates."""
    return tuple(_model_output(result)[1]) if _is_model_output(result) else ()


def named_tensors(result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in ``result`` with its name."""
    if isinstance(result, torch.Tensor):
        yield "output", result
        return
    if _is_model_output(result):
        yield from _model_output(result)[0]
        return
    named = _parts(result)
    if named is None:
        raise ConversionError(f"the model returned {type(result).__name__} without a tensor in it")
    if isinstance(named, Mapping):
        for key, value in named.items():
            yield from _leaves(str(key), value)
    elif len(named) == 1 and isinstance(named[0], torch.Tensor):
        yield "output", named[0]
    else:
        for index, value in enumerate(named):
            yield from _leaves(f"output_{index}", value)


def _model_output(result: Any) -> tuple[list[tuple[str, torch.Tensor]], list[str]]:
    """Return the tensors of a transformers output and its nested outputs, by name, and the names of what is left out.

    A nested output often repeats a tensor of the outer one; that is one output, with the outer name.
    """
    kept: list[tuple[str, torch.Tensor]] = []
    missing = []
    for name, value in sorted(_fields("", result), key=lambda field: "." in field[0]):
        same = next((other for other, tensor in kept if tensor is value), None)
        if not isinstance(value, torch.Tensor):
            missing.append(name)
        elif same is None:
            kept.append((name, value))
        else:
            missing.append(f"{name} (the same tensor as {same})")
    return kept, missing


def _fields(prefix: str, result: Any) -> Iterator[tuple[str, Any]]:
    for key, value in result.items():
        if _is_model_output(value):
            yield from _fields(f"{prefix}{key}.", value)
        elif value is not None and not (isinstance(value, tuple | list) and not value):
            yield f"{prefix}{key}", value


def _leaves(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    parts = _parts(value)
    if parts is None:
        raise ConversionError(
            f"the model's output {name!r} is a {type(value).__name__}, which a graph cannot return; let forward"
            " return tensors, or mappings and sequences of them"
        )
    pairs = parts.items() if isinstance(parts, Mapping) else enumerate(parts)
    for key, part in pairs:
        yield from _leaves(f"{name}.{key}", part)


def _parts(value: Any) -> Mapping[Any, Any] | list[Any] | None:
    """Return the parts of ``value``, without those that are None; None if it is no container."""
    if hasattr(value, "_asdict"):  # a named tuple
        value = value._asdict()
    elif dataclasses.is_dataclass(value) and not isinstance(value, Mapping | type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: part for key, part in value.items() if part is not None}
    if isinstance(value, tuple | list):
        return [part for part in value if part is not None]
    return None


def _is_model_output(result: Any) -> bool:
    return any(base.__name__ == "ModelOutput" for base in type(result).__mro__)
