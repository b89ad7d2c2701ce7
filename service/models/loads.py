"""Loads of models, each on a thread of its own, which can be given up.

Native code cannot be interrupted: a graph can keep ONNX Runtime busy for ever while it opens a session, and torch while
it runs. Then the load is given up, and its thread is left behind. Whatever it still returns is closed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from bf16kit.messages.errors import Unavailable
from bf16kit.service.models.loading import LoadedModel, OnStep

_log = logging.getLogger(__name__)
SLOW_SECONDS = 30.0  # after which the log names the step that a load is at
#: A load that takes longer than this does not hold up other changes, and is given up if its own model is changed again.
PATIENCE_SECONDS = 10.0
#: Threads that were given up and still run, at most: each may keep a processor busy, and hold the memory of a model.
MOST_LEFT_BEHIND = 4
#: Begins the reason of a load that was given up. It is not tried again by itself, as it would only be given up again.
GIVEN_UP = "loading was given up"
STOPPING = "the server is shutting down; try another"
_CHECK_SECONDS = 0.2  # how often a load in progress is looked at


class _Load(threading.Thread):
    """A load in progress. Whoever gives it up cancels ``result``."""

    def __init__(self, label: str, load: Callable[[OnStep], LoadedModel]) -> None:
        super().__init__(name="loading", daemon=True)
        self.label = label
        self.begun = time.monotonic()
        self.step = "beginning", self.begun, math.inf  # replaced as a whole: since when, and the seconds it may take
        self.result: Future[LoadedModel] = Future()
        self._load = load

    def run(self) -> None:
        loaded: LoadedModel | None = None
        error: BaseException | None = None
        try:
            loaded = self._load(self._on_step)
        except BaseException as caught:  # noqa: BLE001 -- the caller of Loads.run() gets it
            error = caught
        if not self.result.set_running_or_notify_cancel():
            _log.warning("%s: the load that was given up has ended; its result is discarded", self.label)
            if loaded is not None:
                loaded.close()
        elif loaded is not None:
            self.result.set_result(loaded)
        else:
            self.result.set_exception(error)

    def _on_step(self, step: str, seconds: float) -> None:
        if self.result.cancelled():
            raise Unavailable(f"{GIVEN_UP} before this step: {step}")
        self.step = step, time.monotonic(), seconds


class Loads:
    """Runs loads for the threads that call :meth:`run`. Thread-safe."""

    def __init__(self) -> None:
        self._given_up: list[_Load] = []  # replaced as a whole; may have some that have ended
        self._lock = threading.Lock()  # for a replacement of that list
        self._stop_at = math.inf

    def run(
        self, label: str, load: Callable[[OnStep], LoadedModel], unwanted: Callable[[], bool] = lambda: False
    ) -> LoadedModel:
        """Return what ``load`` returns, or raise its error. ``label`` names the model.

        Raises Unavailable if a step of the load takes longer than it may, if the load is slow and ``unwanted`` returns
        True, if too many loads that were given up still run, or at :meth:`stop`.
        """
        left = self.left_behind()
        if len(left) >= MOST_LEFT_BEHIND:
            raise Unavailable(
                f"{len(left)} loads that were given up still run ({', '.join(left)}); restart the server to load more"
            )
        attempt, told = _Load(label, load), ""  # told: the step that was logged last
        try:
            attempt.start()
        except RuntimeError as error:  # the system allows no more threads
            raise Unavailable(f"no thread can be started to load it: {error}") from None
        while not wait([attempt.result], _CHECK_SECONDS).done:
            step, since, _ = attempt.step
            if (reason := self._reason_to_give_up(attempt, unwanted)) and attempt.result.cancel():
                with self._lock:
                    self._given_up = [*(each for each in self._given_up if each.is_alive()), attempt]
                raise Unavailable(reason)
            if step != told and time.monotonic() - since >= SLOW_SECONDS:
                told = step
                _log.warning("%s has been loading for %.0f s: %s", label, time.monotonic() - attempt.begun, step)
        return attempt.result.result()

    def stop(self, deadline: float) -> None:
        """Give up at ``deadline``, in :func:`time.monotonic` seconds, what is still being loaded then."""
        self._stop_at = deadline

    def wait(self, deadline: float) -> bool:
        """Wait for the loads that were given up. Returns False if one still runs at ``deadline``."""
        for each in self._given_up:
            each.join(max(0.0, deadline - time.monotonic()))
        return not self.left_behind()

    def left_behind(self) -> list[str]:
        """Return the labels of the loads that were given up and still run."""
        return [each.label for each in self._given_up if each.is_alive()]

    def _reason_to_give_up(self, attempt: _Load, unwanted: Callable[[], bool]) -> str:
        now, (step, since, seconds) = time.monotonic(), attempt.step
        if now >= self._stop_at:
            return STOPPING
        if now - attempt.begun >= PATIENCE_SECONDS and unwanted():
            return f"{GIVEN_UP}, because the model was changed or unloaded meanwhile"
        if now - since < seconds:
            return ""
        return (
            f"{GIVEN_UP}: {step} took longer than {seconds:.0f} s; its thread is left behind, and it is tried again"
            " only if its files change or a client asks for it"
        )
