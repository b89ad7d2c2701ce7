"""What the process with the references is at, in memory that whoever leads it reads when that has died.

A message would not do: a library that ends the process gives it no time to be sent. Writing here costs a microsecond.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

Key = tuple[str, int]  # a model's name, and its version
#: Of a reference; what a loading one is opened from is part of loading it.
Work = Literal["loading", "running"]
_WORKS: tuple[Work, ...] = ("loading", "running")
_FREE = 0
_DIGEST = 16  # bytes
_PLACE = 1 + _DIGEST
_PLACES = 256  # one thread for each model: of more at once the rest is not told
_BYTES = _PLACE * _PLACES
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Board:
    """``one_by_one``: one works at a time, so that there is one to blame when the process dies."""

    def __init__(self, file: int = -1, *, one_by_one: bool = False) -> None:
        """``file`` is a descriptor that :func:`new_board` gave, and stays the caller's; −1 is memory of this process.
        Raises OSError."""
        self._memory = mmap.mmap(file, _BYTES)
        self._free = list(range(_PLACES))
        self._turn = threading.Lock() if one_by_one else nullcontext()

    @contextmanager
    def at_work(self, label: str, work: Work) -> Iterator[None]:
        """While the reference of the model that is called so is loaded, or run."""
        with self._turn:
            try:
                place = self._free.pop()
            except IndexError:
                yield
                return
            at = place * _PLACE
            self._memory[at + 1 : at + _PLACE] = _digest(label)
            self._memory[at] = 1 + _WORKS.index(work)  # last: what is half written says nothing
            try:
                yield
            finally:
                self._memory[at] = _FREE
                self._free.append(place)

    def read(self, labels: Iterable[str]) -> dict[str, Work]:
        """Those of ``labels`` that are at work; of one that is so twice, loading."""
        names = {_digest(label): label for label in labels}
        found: dict[str, Work] = {}
        for at in range(0, _BYTES, _PLACE):
            label = names.get(self._memory[at + 1 : at + _PLACE])
            state = self._memory[at]
            if label is not None and state != _FREE and found.get(label) != "loading":
                found[label] = _WORKS[state - 1]
        return found

    def close(self) -> None:
        self._memory.close()


def label_of(key: Key) -> str:
    """What a version is called, on the board as in the log."""
    return f"model {key[0]!r} version {key[1]}"


def new_board() -> int:
    """The descriptor of memory for one that two processes share, the caller's to close. Raises OSError."""
    file = os.memfd_create("bf16kit-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, _BYTES)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)  # whoever reads it may rely on its size
    except BaseException:
        os.close(file)
        raise
    return file


def _digest(label: str) -> bytes:
    return hashlib.blake2b(label.encode(), digest_size=_DIGEST).digest()
