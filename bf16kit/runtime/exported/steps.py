"""Runs a torch.export program whose operators were resolved, one call after the other. It imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bf16kit.runtime.exported.values import Ref

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One call, ready to run: ``dead_values`` are values that no later call reads."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Any, ...]
    single: bool
    dead_values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A program whose operators were resolved, and whose dtypes and devices were chosen."""

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[Any, ...]
    outputs: tuple[str, ...] = ()

    def run(self, values: Values) -> dict[str, Any]:
        """Return the outputs by name.

        ``values`` has the inputs and tensors by their names in the graph. It is modified.
        """
        found = self.run_graph(values)
        return {name: value for name, value in zip(self.outputs, found, strict=True) if name}

    def run_graph(self, values: Values) -> list[Any]:
        """Return the graph's results, in their order."""
        for step in self.steps:
            result = step.function(
                *[_resolve(value, values) for value in step.args],
                **{key: _resolve(value, values) for key, value in step.kwargs.items()},
            )
            if step.single:
                values[step.outputs[0]] = result
            else:
                _assign(step.outputs, result, values)
            for name in step.dead_values:
                del values[name]
        return [_resolve(value, values) for value in self.results]


def _resolve(value: Any, values: Values) -> Any:
    kind = type(value)
    if kind is Ref:
        return values[value.name]
    if kind is list:
        return [_resolve(item, values) for item in value]
    return value


def _assign(names: tuple[Any, ...], result: Any, values: Values) -> None:
    """Assign each item of ``result`` to its name; an item that is a list has a tuple of names."""
    if not names or names == (None,):
        return
    for name, item in zip(names, result, strict=True):
        if isinstance(name, tuple):
            _assign(name, item, values)
        elif name is not None:
            values[name] = item


def referenced_names(values: Any) -> set[str]:
    """Return the names that ``values`` refer to."""
    found: set[str] = set()
    for value in values:
        if isinstance(value, Ref):
            found.add(value.name)
        elif isinstance(value, list):
            found |= referenced_names(value)
    return found


def assigned_names(outputs: Any) -> set[str]:
    """Return the names of an operator's ``outputs``."""
    found: set[str] = set()
    for output in outputs:
        found |= assigned_names(output) if isinstance(output, tuple) else {output}
    return found
