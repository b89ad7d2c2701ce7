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

from bf16kit.messages.errors import Unavailable
from service.models.loading import LoadedModel, OnStep

_log = logging.getLogger(__name__)
SLOW_SECONDS = 30.0  # after which the log says what a load is doing
#: A load that takes longer than this does not hold up other changes, and is given up if its own model is changed again.
PATIENCE_SECONDS = 10.0
#: Threads that were given up and still run, at most: each may keep a processor busy, and hold the memory of a model.
MOST_LEFT_BEHIND = 4
#: Begins the reason of a load that was given up. It is not tried again by itself, as it would only be given up again.
GIVEN_UP = "loading was given up"
STOPPING = "the server is shutting down; try another"


class _Attempt:
    """A load in progress. Its fields are guarded by the lock of :class:`Loads`."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.begun = self.step_begun = time.monotonic()
        self.superseded_at = math.inf
        self.step, self.seconds = "beginning", math.inf
        self.ended = self.given_up = False
        self.loaded: LoadedModel | None = None
        self.error: BaseException | None = None


class Loads:
    """Runs loads for the threads that call :meth:`run`. Thread-safe."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._attempts: dict[str, _Attempt] = {}  # by key: those whose threads run
        self._stop_at = math.inf

    def run(self, label: str, key: str, load: Callable[[OnStep], LoadedModel]) -> LoadedModel:
        """Return what ``load`` returns, or raise its error. ``label`` names the model, and ``key`` what is loaded.

        Raises Unavailable if a step of the load takes longer than it may, if an earlier load of the same key was given
        up and still runs, if too many such loads run, if it is superseded, or at :meth:`stop`.
        """
        with self._wake:
            self._check_left_behind(key)
            attempt = self._attempts[key] = _Attempt(label)
            try:
                threading.Thread(target=self._load, args=(key, attempt, load), name="loading", daemon=True).start()
            except RuntimeError as error:
                del self._attempts[key]
                raise Unavailable(f"no thread could be started to load it: {error}") from error
            self._wait(attempt)
        if attempt.error is not None:
            raise attempt.error
        assert attempt.loaded is not None  # noqa: S101 -- for the type checker
        return attempt.loaded

    def supersede(self, key: str, *, wanted: bool = False) -> None:
        """Give up the load of ``key``, if there is one, unless it ends soon: something else is wanted instead.

        With ``wanted`` True, take that back: it is wanted again.
        """
        with self._wake:
            if (attempt := self._attempts.get(key)) is not None:
                attempt.superseded_at = math.inf if wanted else attempt.begun + PATIENCE_SECONDS
                self._wake.notify_all()

    def stop(self, deadline: float) -> bool:
        """Give up at ``deadline`` what is still being loaded. Return whether no thread is left then.

        ``deadline`` is in :func:`time.monotonic` seconds.
        """
        with self._wake:
            self._stop_at = deadline
            self._wake.notify_all()
            return self._wake.wait_for(lambda: not self._attempts, max(0.0, deadline - time.monotonic()))

    def _check_left_behind(self, key: str) -> None:
        if key in self._attempts and self._attempts[key].superseded_at < math.inf:
            raise Unavailable("an earlier load of it, which was not wanted any more, is still ending; try again later")
        if key in self._attempts:
            raise Unavailable(f"{GIVEN_UP} before, and still runs: change the model's files, or restart the server")
        left = [each.label for each in self._attempts.values() if each.given_up]
        if len(left) >= MOST_LEFT_BEHIND:
            raise Unavailable(
                f"{len(left)} loads that were given up still run ({', '.join(left)}); restart the server to load more"
            )

    def _wait(self, attempt: _Attempt) -> None:
        """Wait until the load has ended, or give it up."""
        told = ""  # the step that was logged last
        while not attempt.ended:
            now = time.monotonic()
            latest = min(attempt.step_begun + attempt.seconds, attempt.superseded_at, self._stop_at)
            if now >= latest:
                attempt.given_up = True
                raise Unavailable(self._reason(attempt, now))
            slow_at = SLOW_SECONDS + (attempt.step_begun if told else attempt.begun)
            if attempt.step != told and now >= slow_at:
                told = attempt.step
                _log.warning("%s has been loading for %.0f s: %s", attempt.label, now - attempt.begun, told)
            wait = latest if attempt.step == told else min(latest, slow_at)
            self._wake.wait(min(wait - now, threading.TIMEOUT_MAX))

    def _reason(self, attempt: _Attempt, now: float) -> str:
        if now >= self._stop_at:
            return STOPPING
        if now >= attempt.superseded_at:
            return f"{GIVEN_UP}, because the model was changed or unloaded meanwhile"
        return (
            f"{GIVEN_UP}: {attempt.step} took longer than {attempt.seconds:.0f} s; its thread is left behind, and it is"
            " tried again only if its files change or a client asks for it"
        )

    def _load(self, key: str, attempt: _Attempt, load: Callable[[OnStep], LoadedModel]) -> None:
        """Load, on the attempt's thread."""

        def on_step(step: str, seconds: float) -> None:
            with self._wake:
                if attempt.given_up:
                    raise Unavailable(f"{GIVEN_UP} before this step: {step}")
                attempt.step, attempt.seconds, attempt.step_begun = step, seconds, time.monotonic()
                self._wake.notify_all()

        loaded: LoadedModel | None = None
        error: BaseException | None = None
        try:
            loaded = load(on_step)
        except BaseException as caught:  # noqa: BLE001 -- the caller of run() gets it
            error = caught
        with self._wake:
            attempt.loaded, attempt.error, attempt.ended = loaded, error, True
            del self._attempts[key]
            self._wake.notify_all()
        if attempt.given_up:
            _log.warning("%s: the load that was given up has ended; its result is discarded", attempt.label)
            if loaded is not None:
                loaded.close()
