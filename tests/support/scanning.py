"""``bf16-serve`` that looks at its repository all the time, and loads, replaces and unloads what it finds there."""

from __future__ import annotations

import contextlib
import threading
import time

from bf16kit.errors import ConfigError
from service import app
from service.cli import main
from service.models.repository import Repository

PAUSE_S = 0.1


class Scanning(Repository):
    """Scans its directory over and over, as soon as it is started."""

    def start(self) -> None:
        super().start()
        threading.Thread(target=self._scan, name="scanning", daemon=True).start()

    def _scan(self) -> None:
        while True:
            with contextlib.suppress(ConfigError):
                self.scan()
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    setattr(app, "Repository", Scanning)  # noqa: B010 - the wiring's own name for it
    main()
