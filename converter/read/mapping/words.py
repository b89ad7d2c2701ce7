"""Splits names into words, with synonyms of other frameworks, and numbers, which count layers."""

from __future__ import annotations

import re

_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SAME = {
    "dense": ("fc", "linear", "proj", "projection"),
    "query": ("q",),
    "key": ("k",),
    "value": ("v",),
    "out": ("o", "output"),
    "norm": ("ln", "bn", "gn", "layernorm", "batchnorm", "groupnorm", "rmsnorm"),
    "embed": ("emb", "embedding", "wte"),
    "position": ("pos", "positional", "wpe"),
    "token": ("tok", "word"),
    "attention": ("attn", "mha"),
    "mlp": ("ffn", "ff", "feedforward"),
    "encoder": ("enc",),
    "decoder": ("dec",),
    "head": ("classifier", "logits"),
    "convolution": ("conv",),
}
_ONE = {other: word for word, others in _SAME.items() for other in others}


def words_of(name: str) -> tuple[str, ...]:
    """Return the words of ``name`` in order, in lower case and the singular, synonyms unified."""
    found = (part.lower() for part in _PARTS.findall(name) if not part.isdigit())
    return tuple(_ONE.get(word, word) for word in map(_singular, found))


def numbers_of(name: str) -> tuple[int, ...]:
    """Return the numbers of ``name`` in order."""
    return tuple(int(part) for part in _PARTS.findall(name) if part.isdigit() and len(part) < 10)


def similarity(a: tuple[str, ...], b: tuple[str, ...]) -> float:
    """Return the share of words that two names have in common, from 0 to 1."""
    common = len(set(a) & set(b))
    return 2 * common / (len(set(a)) + len(set(b))) if common else 0.0


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
