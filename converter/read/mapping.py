"""``rules.yaml``: maps each leaf of a checkpoint to a tensor of the model, by regular expressions.

Frameworks name weights and order their axes differently: Flax has a Dense kernel as [in, out], torch as [out, in].

::

    rules:                     # the first rule whose `match` matches a leaf's whole name applies
    - {match: 'params\\.Dense_(\\d+)\\.kernel', to: 'layers.\\1.weight', steps: [{transpose: [1, 0]}]}
    - {match: 'params\\.(.*)\\.bias', to: '\\1.bias'}
    - {match: 'step', drop: true}
    keep: ['.*position_ids']   # tensors of the model that stay as they were built
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from bf16kit.artifact.reading import read_bounded
from bf16kit.converter.read.sources import mismatch_message
from bf16kit.converter.source import Array
from bf16kit.messages.errors import SourceError, UsageError
from bf16kit.messages.wording import printable, quoted

_MOST = 4 << 20  # bytes of a rules file
Shapes = Mapping[str, tuple[int, ...]]  # of a model's tensors, by name
Step = Annotated[dict[Literal["reshape", "transpose"], list[StrictInt]], Field(min_length=1, max_length=1)]


class Rule(BaseModel):
    """Leaves whose whole name matches ``match`` fill the tensor ``to`` after ``steps``, or fill none (``drop``)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    match: re.Pattern[str]
    to: str | None = Field(None, min_length=1)
    drop: bool = False
    steps: list[Step] = []

    @model_validator(mode="after")
    def _one_of_both(self) -> Rule:
        if (self.to is None) != self.drop or (self.drop and self.steps):
            raise ValueError("expected either to: NAME or drop: true")
        return self


class Rules(BaseModel):
    """Rules in order, and the tensors of the model that keep their initial values."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    rules: list[Rule]
    keep: list[re.Pattern[str]] = []


class MapNeeded(UsageError):
    """The names do not match and no map was given; ``template`` is the text of a rules file to complete."""

    def __init__(self, message: str, template: str) -> None:
        super().__init__(message)
        self.template = template


class MappedTensors(NamedTuple):
    """The model's tensors as views of the leaves, the axis orders of transposed leaves, and the names in ``keep``."""

    tensors: Mapping[str, Array]
    orders: Mapping[str, tuple[int, ...]]
    kept: Set[str]


def fill(
    source: Path, path: Path | None, leaves: Mapping[str, Array], shapes: Shapes, optional: Set[str] = frozenset()
) -> MappedTensors:
    """Make tensors of these ``shapes`` from ``leaves`` by the rules in ``path``, or by equal names if it is None.

    Those whose names are ``optional`` may be left unfilled. Raises :class:`SourceError` naming the first five problems
    if the rules do not fit, :class:`UsageError` if they are not valid, and :class:`MapNeeded` if there are none and
    names or shapes differ.
    """
    if path is not None:
        return _apply(_read(path), leaves, shapes, optional)
    rest = {name: array for name, array in leaves.items() if shapes.get(name) != array.shape}
    missing = [name for name in shapes if name not in optional and (name not in leaves or name in rest)]
    if not rest and not missing:
        return MappedTensors(leaves, {}, frozenset())
    raise MapNeeded(
        f"{source}: {len(rest)} of its {len(leaves)} leaves match no tensor of the model by name and shape; complete"
        " the rules on standard output, write them to a file and pass it as --map",
        "\n".join(_template(source, leaves, rest, {name: shapes[name] for name in missing})),
    )


def _template(source: Path, leaves: Mapping[str, Array], rest: Mapping[str, Array], missing: Shapes) -> Iterator[str]:
    """Yield the lines of a rules file: what is open on both sides as comments, and a rule to complete for each leaf."""
    left = [f"{printable(name, keep='')} {list(array.shape)}" for name, array in rest.items()]
    right = [f"{printable(name, keep='')} {list(shape)}" for name, shape in missing.items()]
    width = max(map(len, left), default=0) + 4
    yield f"# For --map: write the model's name as `to` of each rule, or replace it by `drop: true`. {source.name} has:"
    yield f"# {'checkpoint'.ljust(width)}model (each side in its own order)"
    for own, wanted in itertools.zip_longest(left, right, fillvalue=""):
        yield f"# {own.ljust(width)}{wanted}".rstrip()
    yield "# Steps: [{transpose: [1, 0]}] for a Dense kernel, [{transpose: [3, 2, 0, 1]}] for a Conv kernel in two"
    yield "# dimensions, [{reshape: [16, 16]}, {transpose: [1, 0]}] for a kernel with heads."
    yield "rules:"
    for name in leaves:
        to = "" if name in rest else name.replace("\\", "\\\\")
        yield f"- {{match: {_scalar(re.escape(name))}, to: {_scalar(to)}, steps: []}}"


def _scalar(text: str) -> str:
    """Return ``text`` as YAML in single quotes, or as JSON if it has unprintable characters."""
    return "'" + text.replace("'", "''") + "'" if text.isprintable() else json.dumps(text)


def _read(path: Path) -> Rules:
    import yaml

    from bf16kit.messages.yamltext import not_yaml

    text = read_bounded(path, _MOST, UsageError, "the limit for a map", where=f"--map {path}")
    try:
        return Rules.model_validate(yaml.safe_load(text))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part + 1) if isinstance(part, int) else part for part in first["loc"])
        shown = f", and is {quoted(first['input'])}" if first["type"] not in ("missing", "value_error") else ""
        said = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"--map {path}: {place or 'the file'}: {said}{shown}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"--map {path}: {not_yaml(error)}") from None


def _apply(rules: Rules, leaves: Mapping[str, Array], shapes: Shapes, optional: Set[str]) -> MappedTensors:
    tensors: dict[str, Array] = {}
    orders: dict[str, tuple[int, ...]] = {}
    problems = []
    for name, array in leaves.items():
        rule, match = next(((rule, m) for rule in rules.rules if (m := rule.match.fullmatch(name))), (None, None))
        if rule is None or match is None:
            problems.append(f"no rule: {name} {list(array.shape)}")
        elif rule.to is not None:
            to = _expanded(match, rule.to)
            try:
                filled, order = _reordered(array, rule.steps)
                if to not in shapes or to in tensors:
                    claim = "which another leaf fills" if to in shapes else "which the model lacks"
                    raise ValueError(f"is sent to {to}, {claim}")
                if filled.shape != shapes[to]:
                    raise ValueError(f"becomes {list(filled.shape)}, and {to} is {list(shapes[to])} in the model")
            except ValueError as error:
                problems.append(f"{name} {list(array.shape)}: {error}")
                continue
            tensors[to] = filled
            if order is not None and order != tuple(range(array.ndim)):
                orders[name] = order
    kept = {name for name in shapes.keys() - tensors.keys() if any(p.fullmatch(name) for p in rules.keep)}
    done = tensors.keys() | kept | optional
    problems += [f"missing: {name} {list(shape)}" for name, shape in shapes.items() if name not in done]
    if problems:
        raise SourceError(mismatch_message("the rules do not make the checkpoint fit the model", problems))
    return MappedTensors(tensors, orders, kept)


def _expanded(match: re.Match[str], to: str) -> str:
    try:
        return match.expand(to)
    except (re.error, IndexError) as error:  # a group that the pattern does not have
        raise UsageError(f"--map: to {quoted(to)} does not fit match {quoted(match.re.pattern)}: {error}") from None


def _reordered(array: Array, steps: list[Step]) -> tuple[Array, tuple[int, ...] | None]:
    """Return ``array`` after ``steps``, and its new order of axes, or None if it was reshaped."""
    order: tuple[int, ...] | None = tuple(range(array.ndim))
    for step in steps:
        for kind, numbers in step.items():
            if kind == "reshape":
                array, order = array.reshape(numbers), None
            else:
                array, order = array.transpose(numbers), order and tuple(order[axis] for axis in numbers)
    return array, order
