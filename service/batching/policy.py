"""The batching policy that an operator sets for a model, and the observer of its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from service.batching.queue import LevelPolicy, QueuePolicy
from service.request import Timings


class BatchObserver(Protocol):
    """Observes what happens in the queue; must be quick and thread-safe."""

    def rejected(self, reason: str) -> None:
        """Count a rejected request.

        ``reason`` is ``deadline``, ``cancelled``, ``draining``, or the reason of an :class:`Overloaded`.
        """
        ...

    def queued(self, change: int) -> None: ...

    def executed(self, requests: int, rows: int, timings: Timings) -> None:
        """Record one batch that has run. The queue time in ``timings`` has no meaning here."""
        ...


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """How a model's requests are batched. With ``axis`` None or ``max_rows`` 0 every request runs alone.

    ``inline``: see :meth:`Batcher.submit`. ``claimable``: an inline run takes as long as earlier ones of its size, so
    :meth:`Batcher.claim` may be granted. ``beside``: how many batches may run in addition to ``instances``, each of a
    shape that no running batch has; used only if ``max_delay_s`` is 0. A request's ``priority`` chooses one of
    ``levels``, counted from 1, the most urgent; 0 means ``default_level``.
    """

    axis: int | None = None
    max_rows: int = 0
    max_delay_s: float = 0.0
    max_bytes: int = 1 << 62
    levels: tuple[LevelPolicy, ...] = (LevelPolicy(),)
    default_level: int = 1
    instances: int = 1
    beside: int = 0
    inline: bool = False
    claimable: bool = False

    @property
    def batching_enabled(self) -> bool:
        return self.axis is not None and self.max_rows > 0

    def queue_policy(self) -> QueuePolicy:
        rows = self.max_rows if self.batching_enabled else 0
        return QueuePolicy(rows, self.max_delay_s, self.max_bytes, self.instances, self.levels)
