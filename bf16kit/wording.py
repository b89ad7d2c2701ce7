"""What a library says of its failures, made fit to stand in one of our own messages."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

LONGEST = 320  # characters of a reason
_LONG = re.compile(r"\S{300,}")
_READ = 20_000  # characters of a library's text that are looked at
_KEPT = 40  # characters of each end of a long word

_QUOTED = 100  # characters of what somebody sent
_CODE = re.compile(r"\[ONNXRuntimeError\] : -?\d+ : (\w+) : ")
# ONNX Runtime's way of saying which node failed, once for each body that the node is in.
_FAILED = re.compile(
    r"(?:[A-Z_]+: )?Non-zero status code returned while running (\w+) node\. Name:'([^']*)' Status Message: ?"
)
_LOADED = re.compile(r"Load model from .*? failed: ?")
# Where in its sources a library noticed: a path and a line, often with the signature of a C++ function behind them.
_SIGNATURE = r"(?: [^()\n]*\((?:[^()]|\([^()]*\))*\)(?: const)?(?: \[with [^\]]*\])?)?"
_PLACE = re.compile(rf"\S*\.(?:cc|cpp|cu|h|hpp|c|py)\"?:\d+(?::|\]|\b){_SIGNATURE}:? ?\.? ?")
_ASSERTED = "INTERNAL ASSERT FAILED"  # PyTorch, after the C++ of the condition that did not hold
_FRAMES = re.compile(r"\n(?:Exception raised from|frame #|==> Context:|\s*#\d+ ).*", re.DOTALL)
# Where in memory something of a library's is, which each run has elsewhere; torch names its compilation units by it.
_UNIT = re.compile(r" \(of Python compilation unit at: 0x[0-9a-f]+\)")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}\b")


def brief(reason: object, longest: int = LONGEST) -> str:
    """``reason`` without the places in a library's sources, in at most ``longest`` characters and without words of
    hundreds."""
    # Cut first: on a word of 70,000 characters the search for places takes 6 s, in which no other thread runs.
    text = _FRAMES.sub("", without_long_words(str(reason)[:_READ]))
    text = _LOADED.sub("", _CODE.sub(r"\1: ", text))
    if _ASSERTED in text:
        lines = text.splitlines()
        text = "\n".join("an assertion inside PyTorch failed" if _ASSERTED in line else line for line in lines)
    text = _without_addresses(_FAILED.sub(r"\1 '\2': ", _PLACE.sub("", text)))
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def without_long_words(text: str) -> str:
    """``text`` with the middle left out of words of hundreds of characters, which only damage and jokers write."""
    return _LONG.sub(lambda word: f"{word[0][:_KEPT]}…{word[0][-_KEPT:]}", text)


def first_line(error: Exception) -> str:
    """What ``error`` says first, or else what it is."""
    return _without_addresses((str(error).strip().splitlines() or [type(error).__name__])[0])


def _without_addresses(text: str) -> str:
    return _ADDRESS.sub("…", _UNIT.sub("", text))


def refused(error: OSError) -> str:
    """What the system said, and to whom where rights are the reason: who runs in a container seldom made the files."""
    said = error.strerror or str(error)
    return f"{said} to user {os.geteuid()}" if isinstance(error, PermissionError) else said


def first_few(names: Sequence[str], most: int = 5) -> str:
    """The first ``most`` of ``names``, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def quoted(text: str) -> str:
    """``text`` as it stands in a message of ours: in quotes, its control characters spelt, and no more than its start.

    What a peer sent may have 64 MiB, and a NUL takes four characters to spell.
    """
    return repr(text) if len(text) <= _QUOTED else f"{text[:_QUOTED]!r}…"
