"""Shared memory in which the process with the references notes its current work, for the leading process to read later.

It is read after the process has died. A message would not do: a library that ends the process leaves no time to send
one. A write here takes a microsecond.
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

Key = tuple[str, int]  # a model's name and version
#: What is done with a reference. Opening its artifact is part of loading.
Activity = Literal["loading", "running"]
_ACTIVITIES: tuple[Activity, ...] = ("loading", "running")
_FREE = 0
_DIGEST = 16  # bytes
_SLOT_BYTES = 1 + _DIGEST
_SLOTS = 256  # one thread per model; any more at once are not noted
_BYTES = _SLOT_BYTES * _SLOTS
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class ActivityTracker:
    """Tracks which references are being loaded or run.

    ``one_by_one``: only one may be active at a time, so that a death of the process has a single suspect.
    """

    def __init__(self, file: int = -1, *, one_by_one: bool = False) -> None:
        """``file`` is a descriptor from :func:`new_tracker_memory`, which the caller closes; −1 uses memory of this
        process. Raises OSError."""
        self._memory = mmap.mmap(file, _BYTES)
        self._free_slots = list(range(_SLOTS))
        self._exclusive = threading.Lock() if one_by_one else nullcontext()

    @contextmanager
    def track(self, label: str, activity: Activity) -> Iterator[None]:
        """Note that the reference of model ``label`` is being loaded or run, for the duration of the context."""
        with self._exclusive:
            try:
                slot = self._free_slots.pop()
            except IndexError:
                yield
                return
            offset = slot * _SLOT_BYTES
            self._memory[offset + 1 : offset + _SLOT_BYTES] = _digest(label)
            self._memory[offset] = 1 + _ACTIVITIES.index(activity)  # last, so that a half-written entry does not count
            try:
                yield
            finally:
                self._memory[offset] = _FREE
                self._free_slots.append(slot)

    def read(self, labels: Iterable[str]) -> dict[str, Activity]:
        """Return what is done with those of ``labels`` that are active.

        One that is both being loaded and run counts as loading. An entry that makes no sense is left out: a process
        that crashes may have written anything.
        """
        by_digest = {_digest(label): label for label in labels}
        found: dict[str, Activity] = {}
        for offset in range(0, _BYTES, _SLOT_BYTES):
            label = by_digest.get(self._memory[offset + 1 : offset + _SLOT_BYTES])
            state = self._memory[offset]
            if label is not None and _FREE < state <= len(_ACTIVITIES) and found.get(label) != "loading":
                found[label] = _ACTIVITIES[state - 1]
        return found

    def close(self) -> None:
        self._memory.close()


def label_of(key: Key) -> str:
    """Return a version's name, in the tracker and in the log."""
    return f"model {key[0]!r} version {key[1]}"


def new_tracker_memory() -> int:
    """Create shared memory, with which two processes use one :class:`ActivityTracker`.

    Return its descriptor, which the caller closes. Raises OSError.
    """
    file = os.memfd_create("bf16kit-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, _BYTES)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)  # the reader may rely on its size
    except BaseException:
        os.close(file)
        raise
    return file


def _digest(label: str) -> bytes:
    return hashlib.blake2b(label.encode(), digest_size=_DIGEST).digest()
