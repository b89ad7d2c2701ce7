"""A thread that looks at the repository again and again, for ``model_control: poll``."""

from __future__ import annotations

import logging
import threading

from service.models.controller import Controller

_log = logging.getLogger(__name__)
SETTLE_S = 1.0  # what changes for longer than this is left for the next look


class Poll:
    """Looks every ``seconds``. By size, inode and time of files: no file system need tell of its changes."""

    def __init__(self, controller: Controller, seconds: float, settle_seconds: float = SETTLE_S) -> None:
        self._controller = controller
        self._seconds = seconds
        self._settle_seconds = settle_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="repository-poll", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns at once: a look at a network file system that does not answer may never end."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self._controller.poll(lambda: self._stopped.wait(self._settle_seconds))
            except Exception:  # noqa: BLE001 - this thread must live on
                _log.exception("looking at the repository failed; it goes on")
