"""``rules.yaml``: maps each leaf to a tensor of the model, by regular expressions.

::

    rules:                     # the first rule whose `match` matches a leaf's whole name applies
    - {match: 'params\\.Dense_(\\d+)\\.kernel', to: 'layers.\\1.weight', steps: [{transpose: [1, 0]}]}
    - {match: 'params\\.(.*)\\.bias', to: '\\1.bias'}
    - {match: 'step', drop: true}
    keep: ['.*position_ids']   # tensors of the model that stay as they were built
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bf16kit.artifact.reading import read_bounded
from bf16kit.messages.errors import SourceError, UsageError
from bf16kit.messages.wording import quoted
from converter.read.mapping import turns
from converter.read.mapping.slots import Slots
from converter.read.mapping.turns import LayoutStep
from converter.read.statedict import mismatch_message
from converter.source import Array

_MOST = 4 << 20  # bytes of a rules file
_KEYS = {"match", "to", "steps", "drop"}


@dataclass(frozen=True, slots=True)
class Rule:
    """Leaves whose whole name matches ``match`` fill the tensor ``to``, after ``steps``.

    They are dropped if ``to`` is None.
    """

    match: re.Pattern[str]
    to: str | None
    steps: tuple[LayoutStep, ...] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules in order, and the tensors of the model that keep their initial values."""

    rules: tuple[Rule, ...]
    keep: tuple[re.Pattern[str], ...] = ()


@dataclass(frozen=True, slots=True)
class MappedTensors:
    """The model's tensors as views of the leaves, the axis orders of transposed leaves, and the kept tensors' names."""

    tensors: Mapping[str, Array]
    orders: Mapping[str, tuple[int, ...]]
    kept: frozenset[str]


def read(path: Path) -> Rules:
    """Read the rules in ``path``; :class:`UsageError` naming the first that is not valid."""
    import yaml

    text = read_bounded(path, _MOST, UsageError, "the limit for a map", where=f"--map {path}")
    try:
        given = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = " ".join(str(error).split())[:200]
        raise UsageError(f"--map {path}: is not YAML: {first}") from None
    return _parse(given, f"--map {path}")


def _parse(given: Any, where: str) -> Rules:
    if not isinstance(given, dict) or not isinstance(given.get("rules"), list):
        raise UsageError(f"{where}: expected a mapping with a list called rules")
    unknown = sorted(map(str, given.keys() - {"rules", "keep"}))
    if unknown:
        raise UsageError(f"{where}: unknown key {quoted(unknown[0])}; known: rules, keep")
    keep = given.get("keep") or []
    if not isinstance(keep, list):
        raise UsageError(f"{where}: keep is {quoted(str(keep))}, expected a list of regular expressions")
    rules = tuple(_rule(rule, f"{where}: rule {number}") for number, rule in enumerate(given["rules"], 1))
    return Rules(rules, tuple(_pattern(pattern, f"{where}: keep") for pattern in keep))


def _rule(given: Any, where: str) -> Rule:
    if not isinstance(given, dict) or "match" not in given:
        raise UsageError(f"{where}: expected a mapping with match and to, or match and drop")
    unknown = sorted(map(str, given.keys() - _KEYS))
    if unknown:
        raise UsageError(f"{where}: unknown key {quoted(unknown[0])}; known: {', '.join(sorted(_KEYS))}")
    match, to, drop = _pattern(given["match"], where), given.get("to"), given.get("drop", False)
    if drop is True and to is None and given.get("steps") is None:
        return Rule(match, None)
    if drop is not False or not isinstance(to, str) or not to:
        raise UsageError(f"{where}: expected either to: NAME or drop: true")
    return Rule(match, to, turns.parse(given.get("steps"), where))


def _pattern(given: Any, where: str) -> re.Pattern[str]:
    if not isinstance(given, str):
        raise UsageError(f"{where}: {quoted(str(given))} is not a regular expression")
    try:
        return re.compile(given)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{where}: {quoted(given)} is not a regular expression: {error}") from None


def apply(rules: Rules, leaves: Mapping[str, Array], slots: Slots) -> MappedTensors:
    """Make the tensors of ``slots`` from ``leaves``.

    Raises :class:`SourceError` naming the first five problems: leaves that match no rule, that two rules send to one
    tensor, or that do not fit their tensor, and tensors that nothing fills.
    """
    shapes = slots.shapes
    tensors: dict[str, Array] = {}
    orders: dict[str, tuple[int, ...]] = {}
    problems = []
    for name, array in leaves.items():
        rule, to = _first(rules.rules, name)
        if rule is None:
            problems.append(f"no rule: {name} {list(array.shape)}")
        elif to is not None:
            problem = _fill(tensors, orders, name, array, rule.steps, to, shapes)
            problems += [problem] if problem else []
    kept = frozenset(name for name in shapes if name not in tensors and _kept(rules, name))
    filled = {*tensors, *kept, *(slots.twins.get(name, name) for name in tensors)}
    missing = [name for name in shapes if name not in filled and slots.twins.get(name, name) not in filled]
    problems += [f"missing: {name} {list(shapes[name])}" for name in missing]
    if problems:
        raise SourceError(mismatch_message("the rules do not make the checkpoint fit the model", problems))
    return MappedTensors(tensors, orders, kept)


def _first(rules: Sequence[Rule], name: str) -> tuple[Rule | None, str | None]:
    for rule in rules:
        found = rule.match.fullmatch(name)
        if found is not None:
            return rule, None if rule.to is None else _expanded(found, rule.to)
    return None, None


def _expanded(found: re.Match[str], to: str) -> str:
    try:
        return found.expand(to)
    except (re.error, IndexError) as error:  # a group that the pattern does not have
        raise UsageError(f"--map: to {quoted(to)} does not fit match {quoted(found.re.pattern)}: {error}") from None


def _kept(rules: Rules, name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in rules.keep)


def _fill(
    tensors: dict[str, Array],
    orders: dict[str, tuple[int, ...]],
    name: str,
    array: Array,
    steps: Sequence[LayoutStep],
    to: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> str | None:
    """Fill the tensor of a leaf's rule; return the problem, or None."""
    if to not in shapes:
        return f"unexpected: {name} is sent to {to}, which the model lacks"
    if to in tensors:
        return f"twice: {name} is sent to {to}, which another leaf fills"
    try:
        shape = turns.shape_after(array.shape, steps)
    except UsageError as error:
        return f"shape: {name}: {error}"
    if shape != shapes[to]:
        return f"shape: {name} becomes {list(shape)}, and {to} is {list(shapes[to])} in the model"
    tensors[to] = turns.apply_steps(array, steps)
    order = turns.axis_order(array.ndim, steps)
    if order is not None and order != tuple(range(array.ndim)):
        orders[name] = order
    return None


def lines(entries: Sequence[tuple[str, str | None, Sequence[LayoutStep], str]], keep: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a rules file.

    Each entry is a leaf's name, its tensor (None: dropped), its steps, and the reason.
    """
    yield "rules:"
    for name, to, steps, reason in entries:
        action = f"to: {_scalar(_template(to))}" if to is not None else "drop: true"
        steps_text = f", steps: [{', '.join(map(str, steps))}]" if steps else ""
        yield f"- {{match: {_scalar(re.escape(name))}, {action}{steps_text}}}{f'  # {reason}' if reason else ''}"
    if keep:
        yield "keep:  # of the model; nothing in the checkpoint fits"
        yield from (f"- {_scalar(re.escape(name))}" for name in keep)


def _template(name: str) -> str:
    return name.replace("\\", "\\\\")


def _scalar(text: str) -> str:
    """Return ``text`` as YAML in single quotes, or as JSON if it has unprintable characters."""
    return "'" + text.replace("'", "''") + "'" if text.isprintable() else json.dumps(text)
