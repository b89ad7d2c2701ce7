"""Returns memory to the system: a conversion's peak should be that of its largest step, not of all steps together."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bf16kit.system.controlgroup import release_free_memory

_M_MMAP_THRESHOLD = -3  # glibc's number for mallopt
_LARGE = 256 << 10  # bytes


def map_large_blocks() -> None:
    """Make the C library map blocks of 256 KiB and more one by one, for the rest of the process.

    Otherwise glibc raises that threshold up to 32 MiB as it goes, and freed matrices stay behind as holes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)


def keep_few_primitives() -> None:
    """Make torch's oneDNN keep only 16 of its kernels, for the whole process; call it before torch is imported.

    By default it keeps 1,024, one for every shape of every product: 60 MB after two hundred samples of different
    lengths. One sample, layer by layer, reuses fewer than 16. A number set in the environment is kept.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")


@contextmanager
def frozen_heap() -> Iterator[Callable[[bool], None]]:
    """Keep garbage collections from visiting long-lived objects in the block, and yield what sets them aside.

    Each full collection would visit the half million objects of torch and transformers, which takes longer than
    creating what it collects. No garbage is freed before the yielded function is first called. It sets all objects
    aside (``gc.freeze``), until it is called again or the block ends, and first frees garbage if its argument is true.
    If the calling program has set objects aside already, they are left so, and none are set aside here.
    """
    # An object set aside is in no generation. gc.get_freeze_count takes a twentieth of a second for a million of them.
    collects, sets_aside = gc.isenabled(), any(each is sys.modules for each in gc.get_objects())
    gc.disable()

    def set_aside(collect: bool) -> None:
        if collect:
            if sets_aside:
                gc.unfreeze()
            release_memory()
        if sets_aside:
            gc.freeze()
        if collects:
            gc.enable()

    try:
        yield set_aside
    finally:
        if sets_aside:
            gc.unfreeze()
        if collects:
            gc.enable()


def release_memory() -> None:
    """Collect garbage, and make the C library return its free pages, which it would otherwise keep."""
    gc.collect()
    release_free_memory()
