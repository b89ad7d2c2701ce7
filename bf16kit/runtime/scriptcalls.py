"""Checks that the functions in a TorchScript file do not call one another in longer chains than torch survives.

torch compiles a function while it compiles the first one that calls it, and inlines in the same way, by recursion
without a limit: with a stack of 8 MiB, 2,000 functions or methods that each call the next kill torch 2.13.

Which method a call means is known only once torch has compiled the code. Two facts bound it from the text alone. Code
names every class that it uses, so a value of a class's own type comes from ``self``, unless the class names itself. And
torch writes ``self`` only to read an attribute or to call a method.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from bf16kit.messages.errors import RuntimeFailure

LONGEST = 500  # functions in a chain; a hierarchy of modules is one
_DEFINITION = re.compile(r"^(?:class|def)[ \t]+(\w+)", re.MULTILINE)
_METHOD = re.compile(r"^[ \t]+def[ \t]+(\w+)[ \t]*\([ \t]*self[ \t]*:", re.MULTILINE)
_FUNCTION = re.compile(r"\bdef\b")
_NAMED = re.compile(r"__torch__(?:\.\w+)+")
_SELF = re.compile(r"\bself\b")
_USE_OF_SELF = re.compile(r'(?:\bself|\(self\))\.(\w+)|\bgetattr\(self, "([^"\\\n]*)"\)|\bself: ')


@dataclass(slots=True)
class _Definition:
    """A class or function: the longest chain of calls among its own functions, and the definitions that it names."""

    chain: int = 0
    needs: set[str] = field(default_factory=set)


def check(modules: Iterable[tuple[str, str]]) -> None:
    """Raise :class:`RuntimeFailure` if functions in the code may call one another in a circle or too long a chain.

    ``modules`` are qualified names with their code. torch ignores the case of files' names, so definitions whose names
    differ in case alone count as one.
    """
    definitions: dict[str, _Definition] = {}
    for module, text in modules:
        for own, body in _parts(_DEFINITION, text):
            name = f"{module}.{own}".lower()
            definition = definitions.setdefault(name, _Definition())
            definition.chain += _own_chain(name, body)
            definition.needs |= {each.lower() for each in _NAMED.findall(body)} - {name}
    longest = _longest_chain(
        {name: each.chain for name, each in definitions.items()},
        {name: each.needs for name, each in definitions.items()},
    )
    if longest is None:
        raise RuntimeFailure("its code has definitions that need one another in a circle")
    if longest > LONGEST:
        raise RuntimeFailure(f"its code may call {longest} functions in a chain, expected at most {LONGEST}")


def _parts(start: re.Pattern[str], text: str) -> Iterator[tuple[str, str]]:
    """Yield each name that ``start`` finds, with the text up to the next one."""
    found = list(start.finditer(text))
    for match, following in zip(found, [*found[1:], None], strict=False):
        yield match[1], text[match.start() : following.start() if following else len(text)]


def _own_chain(name: str, body: str) -> int:
    """Return an upper bound of the longest chain of calls among the functions of one definition, at least 1."""
    most = len(_FUNCTION.findall(body))
    methods = dict(_parts(_METHOD, body))
    names_itself = sum(each.lower() == name for each in _NAMED.findall(body)) > len(methods)  # as the type of self
    if most <= 1 or most != len(methods) or names_itself:
        return max(1, most)
    calls: dict[str, set[str]] = {}
    for method, text in methods.items():
        uses = list(_USE_OF_SELF.finditer(text))
        if len(uses) != len(_SELF.findall(text)):
            return most  # self may be given another name
        calls[method] = {each[1] or each[2] for each in uses} & methods.keys()
    return _longest_chain(dict.fromkeys(methods, 1), calls) or most


def _longest_chain(lengths: Mapping[str, int], needs: Mapping[str, set[str]]) -> int | None:
    """Return the largest sum of ``lengths`` along a path of ``needs``; None if these have a circle."""
    unresolved = {name: {each for each in named if each in lengths} for name, named in needs.items()}
    needed_by: dict[str, list[str]] = {name: [] for name in lengths}
    for name, named in unresolved.items():
        for each in named:
            needed_by[each].append(name)
    totals = dict(lengths)
    complete = [name for name, named in unresolved.items() if not named]
    for resolved in complete:  # grows while it is read
        for name in needed_by[resolved]:
            totals[name] = max(totals[name], lengths[name] + totals[resolved])
            unresolved[name].discard(resolved)
            if not unresolved[name]:
                complete.append(name)
    return max(totals.values(), default=0) if len(complete) == len(lengths) else None
