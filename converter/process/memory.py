"""Returns memory to the system: a conversion's peak should be that of its largest step, not of all steps together."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

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


class FrozenHeap:
    """Keeps garbage collections from visiting long-lived objects during one conversion.

    Each full collection would visit the half million objects of torch and transformers, which takes longer than
    creating what it collects. Objects are set aside (``gc.freeze``) until the next :meth:`collect`, at the latest until
    the block ends. If the calling program has set objects aside already, they are left so, and none are set aside here.
    """

    def __enter__(self) -> FrozenHeap:
        self._sets_aside = gc.get_freeze_count() == 0
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._sets_aside:
            gc.unfreeze()

    @contextmanager
    def without_collection(self) -> Iterator[None]:
        """Disable collection in the block, and set aside all objects at its end, until :meth:`collect`.

        For imports, and for work that leaves little garbage: no garbage is freed before then.
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

    def collect(self) -> None:
        """Do as :func:`release_memory`, including objects that were set aside; set aside what is left."""
        if self._sets_aside:
            gc.unfreeze()
        release_memory()
        if self._sets_aside:
            gc.freeze()


def release_memory() -> None:
    """Collect garbage, and make the C library return its free pages, which it would otherwise keep."""
    gc.collect()
    release_free_memory()
