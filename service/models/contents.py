"""The models and versions in the repository, listed at most once a second, for clients that ask again and again."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence

from bf16kit.messages.errors import ConfigError
from service.models.directory import Directory

FRESH_S = 1.0  # with 3,000 models a listing takes 0.1 to 0.3 s, which all other threads feel


class Contents:
    """Remembers the newest listing. Callers at the same time wait for one listing and share it."""

    def __init__(self, directory: Directory, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._clock = clock
        self._lock = threading.Lock()
        self._versions: Mapping[str, Sequence[int]] = {}
        self._listed_at = self._outdated_at = -math.inf  # when the newest listing began; when it became outdated

    def versions(self) -> Mapping[str, Sequence[int]]:
        """Return the versions of each model, as a listing found them that began at most a second before this call.

        Empty if the repository cannot be listed.
        """
        oldest = self._clock() - FRESH_S
        with self._lock:
            if self._listed_at <= max(oldest, self._outdated_at):
                began = self._clock()
                try:
                    self._versions = self._directory.versions()
                except ConfigError:
                    self._versions = {}
                self._listed_at = began
            return self._versions

    def outdate(self) -> None:
        """Let the next call list the repository again: a model was loaded or unloaded that the listing may lack."""
        self._outdated_at = self._clock()
