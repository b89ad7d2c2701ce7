"""Decides which models are wanted, by ``model_control``: all in the repository, all as it changes, or those asked for.

It knows directories and wishes, and neither loads nor runs models. So it also works in a process without models.
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
ALL = "*"  # as the only name in ``load_model``: load every model at start


class Controller:
    """Decides what is wanted, and tells it to ``want`` (one model) and ``desire`` (all models).

    With one process these are the methods of :class:`~service.models.reconciler.Reconciler`. ``start_up`` names the
    models that ``explicit`` loads at start. ``retries`` tells :meth:`poll` which failed models to try again.
    :meth:`load` and :meth:`unload`: see :class:`service.operations.ModelControl`.
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
        self._lock = threading.RLock()  # held from look to wish, so that the newest look is the last one told
        self._wishes: dict[str, Wish] = {}
        self._past: dict[str, frozenset[int]] = {}  # versions that were ever wanted
        self._notes: set[str] = set()

    @property
    def wishes(self) -> Mapping[str, Wish]:
        """The wishes now, by model name."""
        return dict(self._wishes)

    def begin(self) -> None:
        """Want the models to start with.

        Raises ConfigError if the repository cannot be listed, or lacks one of them.
        """
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
            if name not in self._wishes:  # a model that does not exist is unloaded already
                nothing: Future[None] = Future()
                nothing.set_result(None)
                return nothing
            self._remember({known: wish for known, wish in self._wishes.items() if known != name})
            return self._want(Wish(name))

    def poll(self, settle: Callable[[], object]) -> None:
        """Want what the repository holds now.

        Models that have changed are read again after ``settle``; those that still change, such as a copy in progress,
        are left for the next poll. Models that have not changed but could not be loaded are tried again when that is
        due.
        """
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
                _log.info("model %r could not be loaded; trying again", wish.name)
                self._want(wish)

    def index(self, served: Iterable[Indexed]) -> list[Indexed]:
        """Return the repository's index: ``served``, plus unloaded versions and models that were never asked for.

        ``served`` has what is loaded, loading, unloading, or cannot be loaded.
        """
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
        """Log the notes that were not in the previous look."""
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
