"""Decides whether bf16 or fp32 answers for each model: one place per server, however many processes serve.

    bf16 ── over the budget beyond chance ────▶ warming ── the reference is loaded and warm ──▶ fp32
      ▲                                            │ it cannot be loaded                          │
      └────────────────────────────────────────────┘                                              │
      └── a minimum stay is over, and enough clean samples are clearly below the budget ──────────┘

A model near its budget does not flap. It falls back when drift is over the budget beyond chance, and returns when the
95 % interval lies below the budget by a margin. A model that falls back again stays twice as long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from bf16kit.messages.errors import Bf16kitError, RuntimeFailure
from bf16kit.messages.wording import brief
from bf16kit.service.drift.contract import LONGEST_STAY_S, DriftVerdict, FallbackPolicy
from bf16kit.service.request import Precision

_log = logging.getLogger(__name__)
MARGIN = 0.1  # of the budget: a model whose drift is nearer to it would come and go
RETRY_S = 60.0  # after the reference could not be loaded: memory may be free by then, and a try costs seconds

Phase = Literal["bf16", "warming", "fp32"]
_Key = tuple[str, int]
_CAUSE_TEXTS = {
    "rounding": "of the size that rounding explains",
    "broken": "more than rounding explains: something is broken",
}


@dataclass(frozen=True, slots=True)
class PrecisionOrder:
    """The precision that is to answer for the version loaded by ``plan``, and the ``reason``.

    ``plan`` is a :attr:`bf16kit.service.models.plan.Plan.digest`; a version loaded by another plan ignores the order.
    """

    model: str
    version: int
    plan: str
    precision: Precision
    reason: str = ""


class ActivePlan(NamedTuple):
    """What currently serves a version: the plan it was loaded by, and since when, as :attr:`DriftVerdict.at`.

    A version loaded in its place differs in ``plan`` or ``since``.
    """

    plan: str
    since: float
    policy: FallbackPolicy


class ServingProcesses(Protocol):
    """The serving processes, one or several."""

    def active_plan(self, model: str, version: int) -> ActivePlan | None:
        """Return what all of them currently serve as this version; None if nothing."""
        ...

    def order(self, order: PrecisionOrder) -> Future[None]:
        """Send the order to all of them, and to those started later.

        The future ends when one of them, at the earliest, has carried it out. It fails if none could.
        """
        ...

    def transition(self, model: str, version: int, to: Precision) -> None:
        """Count a change of precision, once for all processes."""
        ...


class Fallback:
    """The phase of one generation of a model: the decision alone. Times are seconds of one clock, which the caller
    reads.

    ``reason`` explains the phase to a person; it is empty if there is nothing to explain.
    """

    def __init__(self, active: ActivePlan, now: float) -> None:
        self.active = active
        self.phase: Phase = "bf16"
        self.reason = ""
        self.ordered_at = now  # when fp32 was last ordered
        self._policy = active.policy
        self._since = now  # when this phase began
        self._over_at = now  # when a verdict "over" last came while fp32 answered
        self._fallbacks = 0  # in a row
        self._retry_at = now

    @property
    def stay(self) -> float:
        """The minimum time that fp32 answers, in seconds, counted from when bf16 was last over its budget."""
        return min(LONGEST_STAY_S, self._policy.min_stay_seconds * 2.0 ** min(self._fallbacks - 1, 64))

    def receive(self, verdict: DriftVerdict, now: float) -> bool:
        """Apply a verdict. Return whether the phase or the reason changed."""
        before = self.phase, self.reason
        if self._policy.policy == "off" or self.phase == "warming":
            return False
        if self.phase == "fp32":
            self._return(verdict, now)
        elif verdict.state == "over":
            self._fall_back(verdict, now)
        elif verdict.state == "within":
            self.reason = ""
        return (self.phase, self.reason) != before

    def warmed(self, now: float) -> None:
        """Enter phase fp32: the reference is loaded and answers from now on."""
        if now - self._since >= LONGEST_STAY_S:
            self._fallbacks = 0
        self._fallbacks += 1
        self.phase, self._since, self._over_at = "fp32", now, now

    def failed(self, error: str, now: float) -> None:
        """Return to phase bf16, because fp32 cannot answer. A later verdict triggers the next attempt."""
        self.phase, self._retry_at = "bf16", now + RETRY_S
        self.reason = f"{self.reason}; fp32 cannot answer: {error}"

    def _fall_back(self, verdict: DriftVerdict, now: float) -> None:
        if self._policy.policy == "fp32" and now >= self._retry_at:
            self.phase, self.reason = "warming", describe(verdict)
        elif not self.reason:
            self.reason = describe(verdict)

    def _return(self, verdict: DriftVerdict, now: float) -> None:
        if verdict.state == "over":
            self._over_at = now
        clean = (
            verdict.state == "within"
            and not verdict.changed
            and verdict.effective_samples >= self._policy.clean_samples
            and verdict.high < 1 - MARGIN
        )
        if clean and now - self._over_at >= self.stay:
            self.phase, self._since, self.reason = "bf16", now, ""


def describe(verdict: DriftVerdict) -> str:
    """Describe a breach: which bound is over, by how much, and the kind of fault it looks like."""
    if not verdict.metric:
        return "the golden samples can no longer be run"  # see bf16kit.service.drift.gate.breach_verdict
    text = (
        f"{verdict.metric} of output {verdict.output!r} is {verdict.ratio:.3g} times its budget"
        f" (95 %: {verdict.low:.3g} to {verdict.high:.3g}, {verdict.effective_samples:.0f} effective samples)"
    )
    return f"{text}, {_CAUSE_TEXTS[verdict.cause]}" if verdict.cause in _CAUSE_TEXTS else text


class FallbackController:
    """Receives verdicts, decides by :class:`Fallback` and sends orders. Any thread may call; nothing blocks.

    ``restart`` has the shadow begin its measurement anew, so that the next verdicts rest on samples after the change.
    """

    def __init__(
        self,
        processes: ServingProcesses,
        restart: Callable[[str, int], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes = processes
        self._restart = restart
        self._clock = clock
        self._fallbacks: dict[_Key, Fallback] = {}
        self._lock = threading.RLock()  # reentrant: an order may be carried out at once, on this thread

    def receive(self, verdict: DriftVerdict) -> None:
        """Act on a verdict. Verdicts on another plan, or measured before the current version was loaded, are ignored.

        Samples of a version that was replaced are still measured for a while, so such verdicts do come.
        """
        key, now = (verdict.model, verdict.version), self._clock()
        active = self._processes.active_plan(*key)
        with self._lock:
            fallback = self._current(key, active, now)
            if fallback is None or verdict.plan != fallback.active.plan or verdict.at < fallback.active.since:
                return
            before = fallback.phase
            if fallback.receive(verdict, now):
                self._apply(key, fallback, before)

    def maintain(self) -> None:
        """Called at intervals. Two cases need it.

        A version loaded in place of one that fp32 answered for begins with bf16, even if nothing of it is sampled. And
        a process that was restarted and then could not load the reference is asked again.
        """
        now = self._clock()
        with self._lock:
            for key, fallback in list(self._fallbacks.items()):
                if fallback.phase != "fp32":
                    continue
                current = self._current(key, self._processes.active_plan(*key), now)
                if current is fallback and now - fallback.ordered_at >= RETRY_S:
                    fallback.ordered_at = now
                    self._order(key, fallback, "fp32")

    def _current(self, key: _Key, active: ActivePlan | None, now: float) -> Fallback | None:
        """Return what is decided of the current version.

        Another generation starts anew and is ordered to answer in bf16. An order for an earlier version of
        the same plan may still be remembered, and would have it answer in fp32.
        """
        fallback = self._fallbacks.get(key)
        if active is None:
            self._fallbacks.pop(key, None)
            return None
        if fallback is None or fallback.active[:2] != active[:2]:
            fallback = self._fallbacks[key] = Fallback(active, now)
            self._order(key, fallback, "bf16")
        return fallback

    def _apply(self, key: _Key, fallback: Fallback, before: Phase) -> None:
        """Log the new phase or reason, and order what follows from it."""
        label = f"model {key[0]!r} version {key[1]}"
        if fallback.phase == "warming":
            _log.error("%s is over its drift budget: %s; loading the fp32 reference to answer", label, fallback.reason)
            fallback.ordered_at = self._clock()
            self._order(key, fallback, "fp32").add_done_callback(lambda done: self._warmed(key, fallback, done))
            return
        self._order(key, fallback, "bf16")
        if before == "fp32":
            _log.warning("%s: bf16 answers again: its drift is clearly within the budget", label)
            self._precision_changed(key, "bf16")
        elif fallback.reason:
            _log.error("%s is over its drift budget: %s", label, fallback.reason)
        else:
            _log.info("%s is within its drift budget again", label)

    def _warmed(self, key: _Key, fallback: Fallback, done: Future[None]) -> None:
        label, error = f"model {key[0]!r} version {key[1]}", done.exception()
        with self._lock:
            if self._fallbacks.get(key) is not fallback:
                return  # something else was loaded meanwhile
            if error is None:
                fallback.warmed(self._clock())
                _log.warning("%s: fp32 answers: %s", label, fallback.reason)
                self._precision_changed(key, "fp32")
                return
            # A runtime's error text belongs in the log; remote clients must not see it.
            public = isinstance(error, Bf16kitError) and not isinstance(error, RuntimeFailure)
            _log.error("%s: fp32 cannot answer; trying again in %g s or later: %s", label, RETRY_S, brief(error))
            fallback.failed(brief(error) if public else "the server's log says why", self._clock())
            self._order(key, fallback, "bf16")

    def _precision_changed(self, key: _Key, to: Precision) -> None:
        self._processes.transition(*key, to)
        self._restart(*key)

    def _order(self, key: _Key, fallback: Fallback, precision: Precision) -> Future[None]:
        return self._processes.order(PrecisionOrder(*key, fallback.active.plan, precision, fallback.reason))
