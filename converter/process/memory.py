"""Giving memory back to the system: a conversion's peak should be that of its largest step, not of all of them."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from bf16kit.heap import give_back

_M_MMAP_THRESHOLD = -3  # glibc's number for mallopt
_LARGE = 256 << 10  # bytes


def map_large_blocks() -> None:
    """Have the C library map blocks of 256 KiB and more one by one, for the whole process from now on.

    Otherwise glibc raises that bound to 32 MiB as it goes, and matrices that were freed stay behind as holes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)


def keep_few_primitives() -> None:
    """Have torch's oneDNN keep 16 of the kernels that it made, for the whole process; to be called before torch comes.

    It keeps 1,024, one for every shape of every product: 60 MB after two hundred samples of lengths of their own. What
    one sample uses again, layer by layer, are fewer than these. Where the environment says a number, that stays.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")


class Garbage:
    """Spares one conversion the visits to what stays: every full collection would pass the half million objects of
    torch and transformers, which takes longer than what is collected took to make.

    Objects are set aside (``gc.freeze``) until the next :meth:`settle`, at the latest until the block ends. Where the
    program that converts has objects set aside already, that is left as it is, and nothing is spared.
    """

    def __enter__(self) -> Garbage:
        self._sets_aside = gc.get_freeze_count() == 0
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._sets_aside:
            gc.unfreeze()

    @contextmanager
    def uncollected(self) -> Iterator[None]:
        """Collect nothing within the block, and set aside what is there at its end, until :meth:`settle`.

        For importing, and for work that leaves little garbage: none of it is freed before then.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if self._sets_aside:
                gc.freeze()
            if collects:
                gc.enable()

    def settle(self) -> None:
        """:func:`release`, what was set aside included; what is left is set aside."""
        if self._sets_aside:
            gc.unfreeze()
        release()
        if self._sets_aside:
            gc.freeze()


def release() -> None:
    """Collect what is garbage, and have the C library return its free pages, which it otherwise keeps for later."""
    gc.collect()
    give_back()
