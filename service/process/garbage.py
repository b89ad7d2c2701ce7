"""Objects that live as long as a model does are kept out of Python's search for garbage.

A server has some 75,000 of them. Python looks through all when enough new ones have come, a few seconds after the first
load for example, and no request goes on meanwhile: answers were 50 to 190 ms late. Frozen, they are not looked at.
"""

from __future__ import annotations

import gc


def settle() -> None:
    """Collect what is garbage now, frozen or not, and freeze the rest: after a load, and when a model has gone.

    Every thread waits meanwhile, for tens of milliseconds.
    """
    gc.unfreeze()  # or the cycles of a model that is gone would stay for good, with its memory
    gc.collect()
    gc.freeze()
