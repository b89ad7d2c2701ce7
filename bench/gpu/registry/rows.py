"""Kernels of many releases as one table: those that take bf16 somewhere, each with the releases that have it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

Types = Mapping[str, frozenset[str]]
Row = tuple[str, str, int, int, Mapping[str, Sequence[str]]]
BF16 = "bfloat16"
_OPEN = 2**31 - 1  # ONNX Runtime's "and later"


def narrow(rows: Iterable[Row]) -> dict[tuple[str, str, int, int], list[Types]]:
    """By domain, operator, first and last version (0: open): what each kernel takes, where that is bf16 anywhere."""
    found: dict[tuple[str, str, int, int], list[Types]] = defaultdict(list)
    for domain, op, first, last, types in rows:
        short = {name: frozenset(_short(each) for each in taken) for name, taken in types.items()}
        if any(BF16 in taken for taken in short.values()):
            found[domain, op, first, 0 if last == _OPEN else last].append(short)
    return {key: merged(kernels) for key, kernels in found.items()}


def _short(name: str) -> str:
    return name.removeprefix("tensor(").removesuffix(")") if name.startswith("tensor(") else name


def merged(kernels: Sequence[Types]) -> list[Types]:
    """The same combinations of types by fewer kernels: two that differ in one constraint alone are one."""
    left = list(kernels)
    while (pair := next(((a, b) for a, b in combinations(left, 2) if _joinable(a, b)), None)) is not None:
        one, other = pair
        left = [kernel for kernel in left if kernel is not one and kernel is not other]
        left.append({name: one[name] | other[name] for name in one})
    return sorted(left, key=_order)


def _joinable(one: Types, other: Types) -> bool:
    return one.keys() == other.keys() and sum(one[name] != other[name] for name in one) <= 1


def _order(types: Types) -> str:
    return repr(sorted((name, sorted(taken)) for name, taken in types.items()))


def table(kernels_by_release: Mapping[str, Iterable[Row]]) -> dict[str, Any]:
    """``sets``: lists of types. ``kernels``: by domain and operator, [first, last, {constraint: set}, from, to].

    From and to are the first and the last release that has it; to is "" where the newest has it.
    ``kernels_by_release`` has the releases in their order.
    """
    releases = list(kernels_by_release)
    where: dict[tuple[str, str, int, int, str], list[int]] = defaultdict(list)
    types: dict[str, Types] = {}
    for index, release in enumerate(releases):
        for key, kernels in narrow(kernels_by_release[release]).items():
            for kernel in kernels:
                types[_order(kernel)] = kernel
                where[(*key, _order(kernel))].append(index)
    sets = sorted({tuple(sorted(taken)) for kernel in types.values() for taken in kernel.values()})
    kernels_of: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for (domain, op, first, last, name), indices in sorted(where.items()):
        numbers = {of: sets.index(tuple(sorted(taken))) for of, taken in sorted(types[name].items())}
        for begin, end in _spans(indices):
            until = "" if end == len(releases) - 1 else releases[end]
            kernels_of[domain][op].append([first, last, numbers, releases[begin], until])
    return {"sets": [list(each) for each in sets], "kernels": {domain: dict(ops) for domain, ops in kernels_of.items()}}


def _spans(indices: Sequence[int]) -> Iterable[tuple[int, int]]:
    begin = previous = indices[0]
    for index in indices[1:]:
        if index != previous + 1:
            yield begin, previous
            begin = index
        previous = index
    yield begin, previous
