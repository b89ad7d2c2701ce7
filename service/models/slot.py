"""The place of one version of a model: loading, ready or unavailable, and the generation that answers in it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from bf16kit.wording import brief
from service.contract import State
from service.models.generation import Generation
from service.models.plan import Plan
from service.request import Observation
from service.telemetry.modelmetrics import ModelMetrics

_log = logging.getLogger(__name__)
LONGEST_REASON = 1000  # characters


@dataclass(frozen=True, slots=True)
class _Now:
    """State, reason and generation together: whoever reads them sees one moment."""

    state: State
    reason: str
    model: Generation | None = None
    plan: Plan | None = None  # that the generation was loaded by


class Slot:
    """See :class:`service.contract.Slot`. Changed by the reconciler's thread alone."""

    def __init__(self, name: str, version: int, series: ModelMetrics, *, awaited: bool = True) -> None:
        self.name = name
        self.version = version
        self.series = series  # of the generation; before there is one, for the requests that are refused
        self.awaited = awaited  # the server is not ready without it
        self.tried: Plan | None = None  # the newest that was loaded, or could not be
        self._now = _Now("loading", "loading")

    @property
    def label(self) -> str:
        return f"model {self.name!r} version {self.version}"

    @property
    def state(self) -> State:
        return self._now.state

    @property
    def reason(self) -> str:
        return self._now.reason

    @property
    def model(self) -> Generation | None:
        return self._now.model

    @property
    def loaded(self) -> tuple[Generation, Plan] | None:
        """The generation, and what it was loaded by."""
        now = self._now
        return None if now.model is None or now.plan is None else (now.model, now.plan)

    def observe(self, seen: Observation) -> None:
        """See :meth:`service.contract.Slot.observe`."""
        self.series.request(seen)

    def serves(self, plan: Plan) -> bool:
        """Whether what answers was loaded by this very plan."""
        return self._now.plan == plan

    def keep(self) -> None:
        """What answers is what is wanted, whatever should have replaced it meanwhile."""
        self._now = replace(self._now, reason="")

    def begin(self, plan: Plan) -> None:
        """``plan`` is about to be loaded; what answers goes on answering."""
        self.tried = plan
        if self._now.model is None:
            self._now = _Now("loading", "loading")

    def publish(self, model: Generation, plan: Plan) -> None:
        """From now on ``model`` answers."""
        self._now = _Now("ready", "", model, plan)

    def fail(self, reason: str, public: str = "") -> str:
        """Nothing can be loaded. What was loaded before goes on answering; without it, the slot is unavailable.

        ``reason`` is for the log; ``public``, or it, for the status page, the repository's index and who asked for it:
        it is returned. Neither is longer than a person reads, whatever names an artifact has.
        """
        reason = brief(reason, LONGEST_REASON)
        public = public or reason
        if self._now.model is not None:
            _log.error("%s goes on answering as it was loaded before: what should replace it: %s", self.label, reason)
            self._now = replace(self._now, reason=f"answers as it was loaded before: what should replace it: {public}")
            return public
        _log.error("%s is unavailable: %s", self.label, reason)
        self.series.ready(False)
        self._now = _Now("unavailable", public)
        return public

    def withdraw(self, reason: str) -> Generation | None:
        """From now on nothing answers; returns what did, for closing."""
        model, self._now = self._now.model, _Now("unavailable", reason)
        return model
