"""``instances: auto``: one batch on all threads, or several at once on a few each, whichever does more rows per second.

Measured where and when a model is loaded, for a fraction of a second. A model that is spread has a second session for
the batches side by side; both read the same copy of its weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bf16kit.errors import Bf16kitError
from bf16kit.runtime import Runtime
from bf16kit.wording import brief
from service.contract import Array
from service.models import choosing
from service.models.choosing import Clock

_log = logging.getLogger(__name__)
SECONDS = 0.4  # that measuring one model may take, but for its first runs and the last round
ROWS = 8  # of a batch that is measured: what a few dozen clients make
MOST = 8  # instances: more of them would make single batches slow
#: How many times as many rows per second several instances must do: they take memory of their own.
WORTH = 1.05


@dataclass(frozen=True, slots=True)
class Spread:
    """How many batches run at once, on ``narrow`` where there is one, and why."""

    instances: int = 1
    narrow: Runtime | None = None
    why: str = ""

    def close(self) -> None:
        """For a model that does not come to be served."""
        if self.narrow is not None:
            self.narrow.close()


def spread_out(
    wide: Runtime, load: Callable[[int], Runtime], feeds: Mapping[str, Array], threads: int, *, clock: Clock
) -> Spread:
    """Whether ``wide``, on ``threads``, is to have another session beside it, which ``load`` loads on fewer of them."""
    instances = min(threads, MOST)
    if wide.info.backend != "onnxruntime" or wide.info.device != "cpu" or instances == 1:
        return Spread(why="auto: 1 instance, with no threads to share out")
    try:
        narrow = load(threads // instances)
    except Bf16kitError as error:
        _log.warning("instances is auto, and a second session failed: %s", brief(error))
        return Spread(why="auto: 1 instance, a second session failed (the log says why)")
    try:
        gain, rounds = _gain(wide, narrow, feeds, instances, clock)
    except BaseException:
        narrow.close()
        raise
    how = f"{instances} at once do {gain:.2f} times the rows of one with all threads (medians of {rounds})"
    if gain < WORTH:
        narrow.close()
        return Spread(why=f"auto: 1 instance, {how}")
    return Spread(instances, narrow, f"auto: {instances} instances, {how}")


def _gain(
    wide: Runtime, narrow: Runtime, feeds: Mapping[str, Array], instances: int, clock: Clock
) -> tuple[float, int]:
    """How many times the rows per second ``instances`` runs of ``narrow`` at once do, and in how many rounds."""
    with ThreadPoolExecutor(instances, "spreading") as pool:

        def at_once() -> None:
            for future in [pool.submit(narrow.run, feeds) for _ in range(instances)]:
                future.result()

        runs: Mapping[str, Callable[[], object]] = {"wide": lambda: wide.run(feeds), "narrow": at_once}
        for run in runs.values():
            run()  # the first of each is slower
        taken, rounds = choosing.medians(runs, seconds=SECONDS, clock=clock)
    return instances * taken["wide"] / taken["narrow"], rounds
