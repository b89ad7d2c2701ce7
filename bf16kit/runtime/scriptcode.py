"""Checks that the code in a TorchScript file is not nested so deep that torch would overflow its stack.

torch parses, resolves and compiles code by recursion without a limit. With a stack of 8 MiB, torch 2.13 is killed by
4,000 nested lists, 8,000 nested parentheses, signs or blocks, 16,000 operators in a row, or 32,000 ``elif``. torch
writes far flatter code: it splits expressions over statements. For calls see :mod:`bf16kit.runtime.scriptcalls`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime import scriptcalls

DEEPEST_EXPRESSION = 1000  # brackets and operators that enclose or follow one another in one statement
DEEPEST_BLOCK = 1000  # columns of indentation; a block takes one at least
_RECORD = re.compile(r"[^/]*/code/(.*)\.py", re.IGNORECASE | re.DOTALL)  # torch ignores the case of these names
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')  # as torch writes strings
_OTHER_QUOTES = re.compile(r"'|#|\"\"\"")  # torch does not write them, and they move where a string ends
_TOKEN = re.compile(r"[(\[{]|[)\]}]|,|\n|\b(?:and|or|not|if|else|in|is)\b|[-+*/%@&|^~<>=!.]")
_ELIF = re.compile(r"\belif\b")
_INDENTED = re.compile(rf"^[ \t]{{{DEEPEST_BLOCK + 1}}}", re.MULTILINE)


def is_code(record: str) -> bool:
    """Return whether torch takes ``record``, named as in the archive, for code."""
    return _RECORD.fullmatch(record) is not None


def check(code: Mapping[str, str]) -> None:
    """Raise :class:`RuntimeFailure` if the ``code``, by record, or its calls nest deeper than a limit."""
    modules = []
    for record, text in code.items():
        _check_statements(record, text)
        found = _RECORD.fullmatch(record)
        modules.append((found[1].replace("/", ".") if found else "", text))
    scriptcalls.check(modules)


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
    for found in _TOKEN.finditer(text if _OTHER_QUOTES.search(text) else without):
        sign = found[0]
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
