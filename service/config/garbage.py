"""Keeps objects that live as long as a model out of Python's garbage collection.

A server has some 75,000 of them. Python checks all of them when enough new objects exist, for example a few seconds
after the first load. No request proceeds meanwhile: responses were 50 to 190 ms late. Frozen objects are not checked.
"""

from __future__ import annotations

import gc


def collect_and_freeze() -> None:
    """Collect garbage, frozen objects included, and freeze the rest. Call it after a load and after an unload.

    All threads wait meanwhile, for tens of milliseconds.
    """
    gc.unfreeze()  # otherwise the cycles of an unloaded model would never be freed
    gc.collect()
    gc.freeze()
