"""Real English sentences without a download: the prose of Python's own language reference and standard library.

Every Python installation contains about half a megabyte of edited technical English, in ``pydoc_data.topics`` and in
the docstrings of its modules. Many people wrote it over thirty years, about many subjects, so it is varied enough to
calibrate a sentence encoder. The sentences are those of the running Python version, always in the same order.
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
    """Return the first ``count`` distinct sentences, taken in turn from each text so that the subjects mix.

    Raises :class:`ValueError` when this Python installation holds fewer (some distributions strip docstrings).
    """
    found: dict[str, None] = {}
    for round_ in zip_longest(*(_split(text) for text in _texts())):
        found.update((sentence, None) for sentence in round_ if sentence is not None)
        if len(found) >= count:
            return list(found)[:count]
    raise ValueError(f"asked for {count} sentences, but this Python installation holds {len(found)}")


def _texts() -> Iterator[str]:
    """Yield the topics of the language reference, then the docstring of every top-level module, by name."""
    yield from (topics[name] for name in sorted(topics))
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        docstring = ast.get_docstring(ast.parse(file.read_text("utf-8")))
        if docstring:
            yield docstring


def _split(text: str) -> Iterator[str]:
    """Yield the sentences of a text that are prose, without headings, tables and code."""
    for paragraph in re.split(r"\n\s*\n", text):
        if not paragraph.lstrip()[:1].isalpha():
            continue
        for match in _SENTENCE.finditer(" ".join(paragraph.split())):
            sentence = match.group()
            words = sentence.lower().split()
            if len(words) >= 7 and _PROSE.fullmatch(sentence) and len(_FUNCTION_WORDS.intersection(words)) >= 2:
                yield sentence
