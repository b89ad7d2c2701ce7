"""Which models are wanted, by the rules of ``model_control``: all of the repository, as it changes, or those asked for.

Knows directories and wishes, and neither loads nor runs a model: it works as well in a process that has none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, TypeAlias

from bf16kit.errors import ConfigError, NotFound
from service.models.directory import Directory
from service.models.override import Override
from service.models.plan import Wish
from service.models.retries import Retries
from service.operations import Indexed

_log = logging.getLogger(__name__)
Mode: TypeAlias = Literal["none", "poll", "explicit"]
ALL = "*"  # among the models to load at start: every one


class Controller:
    """Says what is wanted to ``want``, of one model, and to ``desire``, of all of them: see
    :class:`~service.models.reconciler.Reconciler`, whose methods these are where there is one process.

    ``start_up`` names the models that ``explicit`` begins with; ``retries`` says what :meth:`poll` wants once more. See
    :class:`service.operations.ModelControl` for :meth:`load` and :meth:`unload`.
    """

    def __init__(
        self,
        root: Path,
        want: Callable[[Wish], Future[None]],
        desire: Callable[[Iterable[Wish]], object],
        mode: Mode = "none",
        start_up: Sequence[str] = (),
        retries: Retries | None = None,
    ) -> None:
        self.mode = mode
        self._directory = Directory(root)
        self._want = want
        self._desire = desire
        self._start_up = start_up
        self._retries = retries
        self._lock = threading.RLock()  # what is told last is what was seen last
        self._wishes: dict[str, Wish] = {}
        self._past: dict[str, frozenset[int]] = {}  # versions that were ever wanted
        self._notes: set[str] = set()

    @property
    def wishes(self) -> Mapping[str, Wish]:
        """What is wanted now, by name."""
        return dict(self._wishes)

    def begin(self) -> None:
        """Want the models to start with. Raises ConfigError when the repository cannot be listed, or lacks one of
        them."""
        if self.mode != "explicit" or tuple(self._start_up) == (ALL,):
            self._tell(self._look())
        else:
            self._tell({name: self._named(name) for name in self._start_up})
        if not self._wishes and self.mode != "explicit":
            _log.warning("%s", self._directory.nothing_to_serve(self.mode))

    def load(self, name: str, config: str | None = None) -> Future[None]:
        with self._lock:
            override = None if config is None else Override(name, config)
            wish = self._directory.wish(name, None if override is None else override.change)
            if override is not None:
                override.check(wish)
            self._remember({**self._wishes, name: wish})
            return self._want(wish)

    def unload(self, name: str) -> Future[None]:
        with self._lock:
            if name not in self._wishes:  # nor need it exist: who unloads wants it gone
                nothing: Future[None] = Future()
                nothing.set_result(None)
                return nothing
            self._remember({known: wish for known, wish in self._wishes.items() if known != name})
            return self._want(Wish(name))

    def poll(self, settle: Callable[[], object]) -> None:
        """Want what the repository holds now. What has changed is looked at again after ``settle``; where it goes on
        changing, as while it is copied, it is left for the next time. What has not, and could not be loaded, is wanted
        once more when it is due."""
        with self._lock:
            try:
                first = self._look()
                second = first if first == self._wishes else self._look_again(settle)
            except ConfigError as error:
                self._note([str(error)])
                return
            names = sorted({*self._wishes, *first, *second})
            seen = {n: second.get(n) if first.get(n) == second.get(n) else self._wishes.get(n) for n in names}
            wishes = {name: wish for name, wish in seen.items() if wish is not None}
            if wishes != self._wishes:
                self._tell(wishes)
            for wish in [] if self._retries is None else self._retries.due(wishes):
                _log.info("model %r could not be loaded and is tried again", wish.name)
                self._want(wish)

    def index(self, served: Iterable[Indexed]) -> list[Indexed]:
        """The repository's index: ``served`` is what is loaded, loading, unloading or cannot be loaded; beside them
        those that are unloaded, and those that nobody has asked for."""
        lines = list(served)
        try:
            names = self._directory.names()
        except ConfigError:
            names = []
        known = {(line.name, line.version) for line in lines}
        for name in names:
            past = [str(v) for v in sorted(self._past.get(name, ())) if self._directory.has_version(name, v)]
            lines += [Indexed(name, v, "UNAVAILABLE", "unloaded") for v in past if (name, v) not in known]
        named = {line.name for line in lines}
        lines += [Indexed(name) for name in names if name not in named]
        return sorted(lines, key=lambda line: (line.name, int(line.version or 0)))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _named(self, name: str) -> Wish:
        try:
            return self._directory.wish(name)
        except NotFound as error:
            known = ", ".join(self._directory.names()) or "none"
            raise ConfigError(f"load_model: {error}; its models are {known}") from None

    def _look(self) -> dict[str, Wish]:
        seen = self._directory.look(self._wishes if self.mode == "poll" else None)
        self._note(seen.notes)
        return seen.wishes

    def _look_again(self, settle: Callable[[], object]) -> dict[str, Wish]:
        settle()
        return self._look()

    def _note(self, notes: Sequence[str]) -> None:
        """Tell the log of what it was not told the last time."""
        for note in notes:
            if note not in self._notes:
                _log.warning("%s", note)
        self._notes = set(notes)

    def _tell(self, wishes: Mapping[str, Wish]) -> None:
        self._remember(wishes)
        self._desire(wishes.values())

    def _remember(self, wishes: Mapping[str, Wish]) -> None:
        self._wishes = dict(wishes)
        for name, wish in wishes.items():
            self._past[name] = self._past.get(name, frozenset()) | wish.versions
