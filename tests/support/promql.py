"""The names in a PromQL expression: metrics, the labels it selects or groups by, and the values of these labels.

This is not a parser: Prometheus' own parser checks the syntax. This module finds names, to check that they exist.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_METRIC = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SELECTOR = re.compile(rf"(?<![\w.$\"'])(?P<name>{_METRIC})\s*(?P<labels>\{{(?:[^\"'}}]|\"[^\"]*\"|'[^']*')*\}})?")
_MATCHER = re.compile(r"([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*(?:\"([^\"]*)\"|'([^']*)')")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_KEYWORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "bool", "offset", "group_left", "group_right"}
_KEYWORDS |= {"inf", "nan"}


@dataclass(frozen=True)
class Selector:
    """One metric in an expression, and the labels in its matchers. ``equals`` has the matchers with ``=``."""

    metric: str
    labels: frozenset[str]
    equals: Mapping[str, str] = field(default_factory=dict)


def selectors(expression: str) -> Iterator[Selector]:
    """Yield every metric in the expression, but no functions, keywords or durations."""
    bare = _GROUPING.sub(" ", expression)
    for found in _SELECTOR.finditer(bare):
        name = found["name"]
        calls = bare[found.end() :].lstrip().startswith("(")
        if calls or name.lower() in _KEYWORDS:
            continue
        matchers = _MATCHER.findall(found["labels"] or "")
        equals = {label: double or single for label, kind, double, single in matchers if kind == "="}
        yield Selector(name, frozenset(label for label, *_ in matchers), equals)


_COUNTED = re.compile(r'count_values[^"]*\("(\w+)"')


def grouped(expression: str) -> set[str]:
    """Return the labels by which the expression groups or joins."""
    return {name.strip() for names in _GROUPING.findall(expression) for name in names.split(",") if name.strip()}


def counted(expression: str) -> set[str]:
    """Return the labels that ``count_values`` makes of values."""
    return set(_COUNTED.findall(expression))
