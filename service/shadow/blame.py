"""Which model's reference is to blame for the deaths of the process with all references, and stays off.

A death is held against whoever was at work then. The first may have several at work, so from then on one works at a
time; of whoever is alone at work when the process dies, and was at work when it died before, the second is the last.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from service.shadow.board import Board, Key, Work, label_of, new_board

DEATHS = 2  # in a row
FORGIVEN_SECONDS = 3600.0  # that a process ran: what happened before is no part of a row any more
_WORDS: Mapping[Work, str] = {"loading": "being loaded", "running": "running"}


class Culprit(NamedTuple):
    """A reference that stays off."""

    key: Key
    reason: str  # for people


class Blame:
    """Told of every start and every death, by the thread that leads the process. ``clock`` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = 0.0
        self._board: Board | None = None  # what the process that runs is at
        self._deaths: dict[Key, int] = {}  # in a row, of those that were at work in the newest

    @property
    def one_by_one(self) -> bool:
        """Whether the process is to have one at work at a time."""
        return bool(self._deaths)

    def begin(self) -> int:
        """A process is being started: the descriptor of its board, the caller's to close. Raises OSError."""
        file = new_board()
        try:
            self._board, self._began = Board(file), self._clock()
        except BaseException:
            os.close(file)
            raise
        return file

    def died(self, known: Collection[Key]) -> Culprit | None:
        """It has died. ``known`` are all that it was to measure."""
        board, self._board = self._board, None
        if board is None:
            return None
        labels = {label_of(key): key for key in known}
        at_work = {labels[label]: work for label, work in board.read(labels).items()}
        board.close()
        before = {} if self._clock() - self._began >= FORGIVEN_SECONDS else self._deaths
        self._deaths = {key: before.get(key, 0) + 1 for key in at_work}
        if len(at_work) != 1:
            return None
        ((key, work),) = at_work.items()
        if self._deaths[key] < DEATHS:
            return None
        self._deaths = {}
        return Culprit(
            key,
            f"the process that measures died {DEATHS} times in a row while the fp32 reference of this model was"
            f" {_WORDS[work]}, so it stays off until the model is loaded anew; other models are measured on",
        )
