"""The numerics without their compiled loops."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bf16kit.numerics import rounding


@contextmanager
def without_loops() -> Iterator[None]:
    """Compute with numpy, as where the library was not built."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rounding, "LIBRARY", Path("/nowhere/_bf16kernel.so"))
        rounding.loops.cache_clear()
        try:
            assert rounding.loops() is None
            yield
        finally:
            rounding.loops.cache_clear()
