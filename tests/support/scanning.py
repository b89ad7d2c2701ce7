"""``bf16-serve`` that scans its repository continuously, and loads, replaces and unloads the models that it finds."""

import threading
import time

from bf16kit.service import leader
from bf16kit.service.cli import main
from bf16kit.service.models import loading
from bf16kit.service.models.controller import Controller

PAUSE_S = 0.1
FIRST_RUN_S = 5.0  # the real one is 300 s


class Scanning(Controller):
    """Polls its repository every :data:`PAUSE_S`, and waits for no copy to end."""

    def apply_initial(self) -> None:
        super().apply_initial()
        threading.Thread(target=self._scan_repeatedly, name="scanning", daemon=True).start()

    def _scan_repeatedly(self) -> None:
        while True:
            self.poll(lambda: None)
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    assert vars(leader)["Controller"] is Controller  # otherwise the next line would have no effect
    setattr(leader, "Controller", Scanning)  # noqa: B010 - the name under which the server's wiring finds the class
    loading.FIRST_RUN_SECONDS = FIRST_RUN_S
    main()
