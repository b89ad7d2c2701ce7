"""What an operator says of a model's batches, and what whoever counts is told of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from service.batching.queue import LevelPolicy, QueuePolicy
from service.request import Timings


class BatchObserver(Protocol):
    """Told what happens in the queue; must be quick and thread-safe."""

    def rejected(self, reason: str) -> None:
        """``reason`` is ``deadline``, ``cancelled``, ``draining``, or what :class:`Overloaded` says."""
        ...

    def queued(self, change: int) -> None: ...

    def executed(self, requests: int, rows: int, timings: Timings) -> None:
        """One batch has run; the queue time in ``timings`` means nothing here."""
        ...


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """``axis`` None or ``max_rows`` 0: every request runs alone. ``inline``: see :meth:`Batcher.submit`. ``beside``: so
    many more batches at once than ``instances``, of shapes that none of the others has, where ``max_delay_s`` is 0.

    A request's ``priority`` chooses one of ``levels``, counted from 1, the most urgent; 0 means ``default_level``.
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

    @property
    def batches(self) -> bool:
        return self.axis is not None and self.max_rows > 0

    def queue(self) -> QueuePolicy:
        rows = self.max_rows if self.batches else 0
        return QueuePolicy(rows, self.max_delay_s, self.max_bytes, self.instances, self.levels)
