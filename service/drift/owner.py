"""Decides which precision answers for each model: one place per server, however many processes serve."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol, Self

from bf16kit.messages.errors import Bf16kitError, RuntimeFailure
from bf16kit.messages.wording import brief
from service.drift.fallback import Fallback
from service.drift.fallbackpolicy import FallbackPolicy
from service.drift.verdict import DriftVerdict
from service.request import Precision

_log = logging.getLogger(__name__)
_Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class PrecisionOrder:
    """The precision that is to answer for the version loaded by ``plan`` (a :attr:`service.models.plan.Plan.digest`).

    ``reason`` says why. The order does not apply to a version that was loaded by another plan.
    """

    model: str
    version: int
    plan: str
    precision: Precision
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Parse :meth:`to_json`'s output without checks: processes of one server trust each other."""
        return cls(fields["model"], fields["version"], fields["plan"], fields["precision"], fields["reason"])


class ActivePlan(NamedTuple):
    """What currently serves a version: the plan it was loaded by, and since when, in Unix seconds.

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


@dataclass(slots=True)
class _State:
    active: ActivePlan
    fallback: Fallback
    ordered_at: float = 0.0  # when fp32 was last ordered


class FallbackOwner:
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
        self._states: dict[_Key, _State] = {}
        self._lock = threading.RLock()  # reentrant: an order may be carried out at once, on this thread

    def receive(self, verdict: DriftVerdict) -> None:
        """Act on a verdict. Verdicts on another plan, or measured before the current version was loaded, are ignored.

        Samples of a version that was replaced are still measured for a while, so such verdicts do come.
        """
        key, now = (verdict.model, verdict.version), self._clock()
        active = self._processes.active_plan(*key)
        with self._lock:
            state = self._state(key, active, now)
            if state is None or verdict.plan != state.active.plan or verdict.at < state.active.since:
                return
            before = state.fallback.phase
            if not state.fallback.receive(verdict, now):
                return
            self._apply(key, state, before)

    def maintain(self) -> None:
        """Called at intervals. Two cases need it.

        A version loaded in place of one that fp32 answered for begins with bf16, even if nothing of it is sampled. And
        a process that was restarted and then could not load the reference is asked again.
        """
        now = self._clock()
        with self._lock:
            for key, state in list(self._states.items()):
                if (
                    state.fallback.phase != "fp32"
                    or self._state(key, self._processes.active_plan(*key), now) is not state
                ):
                    continue
                if now - state.ordered_at >= state.active.policy.retry_seconds:
                    state.ordered_at = now
                    self._order(key, state, "fp32")

    def _state(self, key: _Key, active: ActivePlan | None, now: float) -> _State | None:
        """Return the state of the current version.

        Another generation starts with a new state and is ordered to answer in bf16. An order for an earlier version of
        the same plan may still be remembered, and would have it answer in fp32.
        """
        state = self._states.get(key)
        if active is None:
            self._states.pop(key, None)
            return None
        if state is None or state.active[:2] != active[:2]:
            state = self._states[key] = _State(active, Fallback(active.policy, now))
            self._order(key, state, "bf16")
        return state

    def _apply(self, key: _Key, state: _State, before: str) -> None:
        """Log the new phase or reason, and order what follows from it."""
        label, fallback = f"model {key[0]!r} version {key[1]}", state.fallback
        if fallback.phase == "warming":
            _log.error("%s is over its drift budget: %s; loading the fp32 reference to answer", label, fallback.reason)
            state.ordered_at = self._clock()
            self._order(key, state, "fp32").add_done_callback(lambda done: self._warmed(key, state, done))
            return
        self._order(key, state, "bf16")
        if before == "fp32":
            _log.warning("%s: bf16 answers again: its drift is clearly within the budget", label)
            self._precision_changed(key, "bf16")
        elif fallback.reason:
            _log.error("%s is over its drift budget: %s", label, fallback.reason)
        else:
            _log.info("%s is within its drift budget again", label)

    def _warmed(self, key: _Key, state: _State, done: Future[None]) -> None:
        label, error = f"model {key[0]!r} version {key[1]}", done.exception()
        with self._lock:
            if self._states.get(key) is not state:
                return  # something else was loaded meanwhile
            if error is None:
                state.fallback.warmed(self._clock())
                _log.warning("%s: fp32 answers: %s", label, state.fallback.reason)
                self._precision_changed(key, "fp32")
                return
            # A runtime's error text belongs in the log; remote clients must not see it.
            public = isinstance(error, Bf16kitError) and not isinstance(error, RuntimeFailure)
            retry = state.active.policy.retry_seconds
            _log.error("%s: fp32 cannot answer; trying again in %g s or later: %s", label, retry, brief(error))
            state.fallback.failed(brief(error) if public else "the server's log says why", self._clock())
            self._order(key, state, "bf16")

    def _precision_changed(self, key: _Key, to: Precision) -> None:
        self._processes.transition(*key, to)
        self._restart(*key)

    def _order(self, key: _Key, state: _State, precision: Precision) -> Future[None]:
        return self._processes.order(PrecisionOrder(*key, state.active.plan, precision, state.fallback.reason))
