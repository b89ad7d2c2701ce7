"""Checks that the code in a TorchScript file is not nested so deep that torch would overflow its stack.

torch parses, resolves and compiles code by recursion without a limit. With a stack of 8 MiB, torch 2.13 is killed by
4,000 nested lists, 8,000 nested parentheses, signs or blocks, 16,000 operators in a row, 32,000 ``elif``, or 2,000
functions that each call the next. torch writes far flatter code: it splits expressions over statements.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bf16kit.errors import RuntimeFailure

DEEPEST_EXPRESSION = 1000  # brackets and operators that enclose or follow one another in one statement
DEEPEST_BLOCK = 1000  # columns of indentation; a block takes one at least
DEEPEST_CALLS = 300  # definitions of which each needs the next; a hierarchy of modules is one such chain
_RECORD = re.compile(r"[^/]*/code/(.*)\.py", re.IGNORECASE | re.DOTALL)  # torch ignores the case of these names
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')  # as torch writes strings
_OTHER_QUOTES = re.compile(r"'|#|\"\"\"")  # torch does not write them, and they move where a string ends
_TOKEN = re.compile(r"[(\[{]|[)\]}]|,|\n|\b(?:and|or|not|if|else|in|is)\b|[-+*/%@&|^~<>=!.]")
_ELIF = re.compile(r"\belif\b")
_INDENTED = re.compile(rf"^[ \t]{{{DEEPEST_BLOCK + 1}}}", re.MULTILINE)
_DEFINED = re.compile(r"^(?:class|def)[ \t]+(\w+)", re.MULTILINE)
_NAMED = re.compile(r"__torch__(?:\.\w+)+")


def is_code(record: str) -> bool:
    """Return whether torch takes ``record``, named as in the archive, for code."""
    return _RECORD.fullmatch(record) is not None


def check(code: Mapping[str, str]) -> None:
    """Raise :class:`RuntimeFailure` if the ``code``, by record, is nested deeper than one of the limits."""
    needs: dict[str, set[str]] = {}
    for record, text in code.items():
        _check_statements(record, text)
        needs |= _needs(record, text)
    _check_calls(needs)


def _check_statements(record: str, text: str) -> None:
    if _INDENTED.search(text) is not None or len(_ELIF.findall(text)) > DEEPEST_BLOCK:
        raise RuntimeFailure(f"the code in {record!r} has blocks nested deeper than {DEEPEST_BLOCK}")
    if _depth(text) > DEEPEST_EXPRESSION:
        raise RuntimeFailure(f"the code in {record!r} has an expression nested deeper than {DEEPEST_EXPRESSION}")


def _depth(text: str) -> int:
    """Return an upper bound of the depth of the deepest expression in ``text``.

    Each operator counts as one level, up to the next comma of the same bracket: elements of a list lie beside each
    other. Where strings cannot be told from code for certain, they count as code.
    """
    text = text.replace("\\\n", "")
    without = _STRING.sub("_", text)
    levels, total, deepest = [0], 0, 0  # operators since the last comma, for each open bracket
    for sign in _TOKEN.findall(text if _OTHER_QUOTES.search(text) else without):
        if sign in "([{":
            levels.append(1)
            total += 1
        elif sign in ")]}":
            total -= levels.pop() if len(levels) > 1 else 0
            levels[-1] += 1  # what follows a call is applied to it
            total += 1
        elif sign == "," or (sign == "\n" and len(levels) == 1):
            total -= levels[-1] - (len(levels) > 1)
            levels[-1] = int(len(levels) > 1)
        elif sign != "\n":
            levels[-1] += 1
            total += 1
        deepest = max(deepest, total)
    return deepest


def _needs(record: str, text: str) -> dict[str, set[str]]:
    """Return the definitions of a record, each with the other definitions that its code names."""
    found = _RECORD.fullmatch(record)
    module = found[1].replace("/", ".").lower() if found else ""
    starts = [(match.start(), f"{module}.{match[1].lower()}") for match in _DEFINED.finditer(text)]
    ends = [start for start, _ in starts[1:]] + [len(text)]
    return {
        name: {each.lower() for each in _NAMED.findall(text[start:end])} - {name}
        for (start, name), end in zip(starts, ends, strict=True)
    }


def _check_calls(needs: Mapping[str, set[str]]) -> None:
    """Give each definition its level, 1 more than the highest that it needs; in a cycle there is none."""
    open_needs = {name: {each for each in named if each in needs} for name, named in needs.items()}
    needed_by: dict[str, list[str]] = {name: [] for name in needs}
    for name, named in open_needs.items():
        for each in named:
            needed_by[each].append(name)
    level, without = 0, [name for name, named in open_needs.items() if not named]
    left = len(needs)
    while without and level < DEEPEST_CALLS:
        level, left = level + 1, left - len(without)
        following = []
        for done in without:
            for name in needed_by[done]:
                open_needs[name].discard(done)
                if not open_needs[name]:
                    following.append(name)
        without = following
    if left:
        raise RuntimeFailure(
            f"its code has definitions that need one another, in a circle or a chain of more than {DEEPEST_CALLS}"
        )
