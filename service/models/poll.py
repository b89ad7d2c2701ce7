"""The thread that reads the repository periodically, for ``model_control: poll``."""

from __future__ import annotations

import logging
import threading

from service.models.controller import Controller

_log = logging.getLogger(__name__)
SETTLE_S = 1.0  # a model that still changes after this time is left for the next poll


class RepositoryPoller:
    """Polls every ``seconds``. Changes are seen by size, inode and time of files, so that any file system will do."""

    def __init__(self, controller: Controller, seconds: float, settle_seconds: float = SETTLE_S) -> None:
        self._controller = controller
        self._seconds = seconds
        self._settle_seconds = settle_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="repository-poll", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end, without waiting: reading a network file system may never end."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self._controller.poll(lambda: self._stopped.wait(self._settle_seconds))
            except Exception:  # noqa: BLE001 - this thread must live on
                _log.exception("looking at the repository failed; it will run again")
