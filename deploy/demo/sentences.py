"""Real English sentences without a download: the prose of Python's own language reference and standard library.

Every Python installation carries about half a megabyte of edited technical English, in ``pydoc_data.topics`` and in the
docstrings of its modules. It was written by many people over thirty years, about numbers, files, mail, colours, clocks
and turtles: varied enough to calibrate a sentence encoder, and on every machine. The sentences are those of the running
Python version, always in the same order.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from pydoc_data.topics import topics

_SENTENCE = re.compile(r"[A-Z][^.?!]{30,180}[.?!](?=\s|$)")
_PROSE = re.compile(r"[A-Za-z0-9 ,;:'()\-]+[.?!]")  # no code, no markup, no doctest
_FUNCTION_WORDS = {"the", "a", "an", "of", "to", "is", "are", "and", "in", "that", "for", "by", "with", "it"}


def sentences(count: int) -> list[str]:
    """The first ``count`` distinct sentences, drawn in turn from each text so that the subjects mix.

    Raises :class:`ValueError` when this Python installation holds fewer (some distributions strip docstrings).
    """
    found: dict[str, None] = {}
    for round_ in zip_longest(*(_split(text) for text in _texts())):
        found.update((sentence, None) for sentence in round_ if sentence is not None)
        if len(found) >= count:
            return list(found)[:count]
    raise ValueError(f"asked for {count} sentences, but this Python installation holds {len(found)}")


def _texts() -> Iterator[str]:
    """The topics of the language reference, then the docstring of every top-level module, by name."""
    yield from (topics[name] for name in sorted(topics))
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        docstring = ast.get_docstring(ast.parse(file.read_text("utf-8")))
        if docstring:
            yield docstring


def _split(text: str) -> Iterator[str]:
    """The sentences of a text that are prose; headings, tables and code fall through."""
    for paragraph in re.split(r"\n\s*\n", text):
        if not paragraph.lstrip()[:1].isalpha():
            continue
        for match in _SENTENCE.finditer(" ".join(paragraph.split())):
            sentence = match.group()
            words = sentence.lower().split()
            if len(words) >= 7 and _PROSE.fullmatch(sentence) and len(_FUNCTION_WORDS.intersection(words)) >= 2:
                yield sentence
