"""Decides which models are wanted, by ``model_control``: all in the repository, all as it changes, or those asked for.

It knows directories and desired models, and neither loads nor runs models: it also works in a process without models.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, TypeAlias

from bf16kit.messages.errors import ConfigError, NotFound
from bf16kit.service.contract import SlotView
from bf16kit.service.models.modelconfig import with_config
from bf16kit.service.models.plan import DesiredModel, Directory
from bf16kit.service.models.rollouts import ApplyAll, Rollouts, has_failed
from bf16kit.service.operations import IndexEntry

_log = logging.getLogger(__name__)
Mode: TypeAlias = Literal["none", "poll", "explicit"]
ALL = "*"  # as the only name in ``load_model``: load every model at start
SETTLE_S = 1.0  # a model that still changes after this time is left for the next poll
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 30.0, 3600.0  # the first and the longest pause between loads of unchanged files
LISTED_S = 1.0  # how long a listing of the repository answers requests for the index: anybody may ask, and it is slow


class Controller:
    """Decides what is wanted, and passes it to ``apply`` (one model) and ``apply_all`` (the models of the start).

    See :class:`bf16kit.service.leader.ServedModels`. ``start_up`` names the models that ``explicit`` loads at start.
    ``slots`` returns the server's slots, and ``clock`` seconds. :meth:`load` and :meth:`unload`: see
    :class:`bf16kit.service.operations.ModelControl`.
    """

    def __init__(
        self,
        root: Path,
        apply: Callable[[DesiredModel], Future[None]],
        apply_all: ApplyAll,
        mode: Mode = "none",
        start_up: Sequence[str] = (),
        slots: Callable[[], Iterable[SlotView]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mode = mode
        self._directory = Directory(root)
        self._start_up = start_up
        self._slots = slots
        self._lock = threading.RLock()  # held from scan to apply, so that the newest scan is applied last
        self._rollouts = Rollouts(apply, apply_all, slots, self._directory.older, self._lock)
        self._desired_models: dict[str, DesiredModel] = {}
        self._notes: set[str] = set()
        self._clock = clock
        #: By name, the models that could not be loaded: when they are due, and the pause after that.
        self._retry_at: dict[str, tuple[DesiredModel, float, float]] = {}
        self._listing: tuple[Mapping[str, DesiredModel], float, Mapping[str, Sequence[int]]] | None = None
        self._listing_lock = threading.Lock()

    @property
    def desired_models(self) -> Mapping[str, DesiredModel]:
        """The models that are desired now, by name."""
        return dict(self._desired_models)

    def apply_initial(self) -> None:
        """Apply the models to start with.

        Raises ConfigError if the repository cannot be listed, or lacks one of them.
        """
        if self.mode != "explicit" or tuple(self._start_up) == (ALL,):
            self._desired_models = self._scan()
        else:
            self._desired_models = {name: self._startup_model(name) for name in self._start_up}
        self._rollouts.start(self._desired_models.values())
        if not self._desired_models and self.mode != "explicit":
            _log.warning("%s", self._directory.nothing_to_serve(self.mode))

    def load(self, name: str, config: str | None = None) -> Future[None]:
        with self._lock:
            desired = self._directory.desired_model(name)
            if config is not None:
                desired = with_config(desired, config)
            self._desired_models = {**self._desired_models, name: desired}
            return self._rollouts.apply(desired, loads_older=False)  # the caller is told, and decides

    def unload(self, name: str) -> Future[None]:
        with self._lock:
            if name not in self._desired_models:  # a model that does not exist is unloaded already
                future: Future[None] = Future()
                future.set_result(None)
                return future
            self._desired_models = {known: each for known, each in self._desired_models.items() if known != name}
            return self._rollouts.apply(DesiredModel(name))

    def poll(self, settle: Callable[[], object] = lambda: time.sleep(SETTLE_S)) -> None:
        """Apply what the repository holds now.

        Models that have changed are read again after ``settle``; those that still change, such as a copy in progress,
        are left for the next poll. Models that have not changed but could not be loaded are tried again when that is
        due. Changes are seen by size, inode and time of files, so that any file system will do.
        """
        with self._lock:
            try:
                first = second = self._scan()
                if first != self._desired_models:
                    settle()
                    second = self._scan()
            except ConfigError as error:
                self._log_new([str(error)])
                return
            names = sorted({*self._desired_models, *first, *second})
            seen = {n: second.get(n) if first.get(n) == second.get(n) else self._desired_models.get(n) for n in names}
            desired_models = {name: desired for name, desired in seen.items() if desired is not None}
            if desired_models != self._desired_models:
                self._desired_models = desired_models
                self._rollouts.replace_all(desired_models.values())
            self._try_again()

    def index(self, served: Iterable[IndexEntry]) -> list[IndexEntry]:
        """Return the repository's index: ``served``, plus unloaded versions and models that were never asked for.

        ``served`` has what is loaded, loading, unloading, or cannot be loaded. The repository is listed at most once a
        second, and after each change of what is desired.
        """
        lines, names = list(served), self._versions()
        known = {(line.name, line.version) for line in lines}
        for name, versions in names.items():
            past = [str(v) for v in versions if v in self._rollouts.versions(name)]
            lines += [IndexEntry(name, v, "UNAVAILABLE", "unloaded") for v in past if (name, v) not in known]
        named = {line.name for line in lines}
        lines += [IndexEntry(name) for name in names if name not in named]
        return sorted(lines, key=lambda line: (line.name, int(line.version or 0)))

    def _versions(self) -> Mapping[str, Sequence[int]]:
        """Return the versions of each model on disk, as of a second ago at most; none if it cannot be listed."""
        with self._listing_lock:
            now, desired = self._clock(), self._desired_models
            if self._listing is None or self._listing[0] is not desired or now - self._listing[1] >= LISTED_S:
                versions: Mapping[str, Sequence[int]] = {}
                with contextlib.suppress(ConfigError):
                    versions = self._directory.versions()
                self._listing = desired, now, versions
            return self._listing[2]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _startup_model(self, name: str) -> DesiredModel:
        try:
            return self._directory.desired_model(name)
        except NotFound as error:
            known = ", ".join(self._directory.versions()) or "none"
            raise ConfigError(f"load_model: {error}; its models are {known}") from None

    def _scan(self) -> dict[str, DesiredModel]:
        scan = self._directory.scan(self._desired_models if self.mode == "poll" else None)
        self._log_new(scan.notes)
        return scan.desired_models

    def _log_new(self, notes: Sequence[str]) -> None:
        """Log the notes that the previous scan did not have."""
        for note in notes:
            if note not in self._notes:
                _log.warning("%s", note)
        self._notes = set(notes)

    def _try_again(self) -> None:
        """Load the models again that could not be loaded, and have not changed since an earlier poll found that."""
        now, before, self._retry_at = self._clock(), self._retry_at, {}
        slots: dict[str, dict[int, SlotView]] = {}
        for slot in self._slots():
            slots.setdefault(slot.name, {})[slot.version] = slot
        for name, desired in self._desired_models.items():
            known, due, pause = before.get(name, (None, 0.0, 0.0))
            of_model = slots.get(name, {})
            if not has_failed(desired, of_model):
                if known == desired and any(slot.state == "loading" for slot in of_model.values()):
                    self._retry_at[name] = desired, due, pause  # it may fail again
                continue
            if known != desired:
                due, pause = now + RETRY_SECONDS, RETRY_SECONDS
            elif now >= due:
                _log.info("model %r could not be loaded; trying again", name)
                self._rollouts.apply(desired)
                pause = min(2 * pause, LONGEST_RETRY_SECONDS)
                due = now + pause
            self._retry_at[name] = desired, due, pause
