"""``bf16-serve`` that looks at its repository all the time, and loads, replaces and unloads what it finds there."""

from __future__ import annotations

import contextlib
import threading
import time

from bf16kit.errors import ConfigError
from service import served
from service.cli import main
from service.models.controller import Controller

PAUSE_S = 0.1


class Scanning(Controller):
    """Wants what lies in its directory over and over, from the start."""

    def begin(self) -> None:
        super().begin()
        threading.Thread(target=self._scan, name="scanning", daemon=True).start()

    def _scan(self) -> None:
        while True:
            with contextlib.suppress(ConfigError):
                super().begin()
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    assert vars(served)["Controller"] is Controller  # or nothing would scan
    setattr(served, "Controller", Scanning)  # noqa: B010 - the wiring's own name for it
    main()
