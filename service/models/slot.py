"""The slot of one version of a model: its state (loading, ready or unavailable) and the generation that answers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from bf16kit.messages.wording import brief
from service.contract import State
from service.models.generation import Generation
from service.models.plan import Plan
from service.request import Observation
from service.telemetry.modelmetrics import ModelMetrics

_log = logging.getLogger(__name__)
LONGEST_REASON = 1000  # characters


@dataclass(frozen=True, slots=True)
class _Status:
    """State, reason and generation in one object, so that readers see them consistently without a lock."""

    state: State
    reason: str
    model: Generation | None = None
    plan: Plan | None = None  # the plan by which the generation was loaded


class Slot:
    """See :class:`service.contract.Slot`. One thread of the reconciler at a time changes it."""

    def __init__(self, name: str, version: int, series: ModelMetrics, *, awaited: bool = True) -> None:
        self.name = name
        self.version = version
        self.series = series  # the generation's metrics; before there is one, they count rejected requests
        self.awaited = awaited  # the server is not ready without it
        self.tried: Plan | None = None  # the newest plan that was loaded, or failed to load
        self._status = _Status("loading", "loading")

    @property
    def label(self) -> str:
        return f"model {self.name!r} version {self.version}"

    @property
    def state(self) -> State:
        return self._status.state

    @property
    def reason(self) -> str:
        return self._status.reason

    @property
    def model(self) -> Generation | None:
        return self._status.model

    @property
    def loaded(self) -> tuple[Generation, Plan] | None:
        """The generation and the plan by which it was loaded; None without a generation."""
        status = self._status
        return None if status.model is None or status.plan is None else (status.model, status.plan)

    def observe(self, seen: Observation) -> None:
        """See :meth:`service.contract.Slot.observe`."""
        self.series.request(seen)

    def serves(self, plan: Plan) -> bool:
        """Return whether the generation that answers was loaded by this very plan."""
        return self._status.plan == plan

    def clear_reason(self) -> None:
        """Clear the reason: the generation that answers is the one wanted, even if a replacement failed before."""
        self._status = replace(self._status, reason="")
        self.series.replacement_failed(False)

    def start_loading(self, plan: Plan) -> None:
        """Note that ``plan`` is about to be loaded. The generation that answers stays."""
        self.tried = plan
        if self._status.model is None:
            self._status = _Status("loading", "loading")

    def publish(self, model: Generation, plan: Plan) -> None:
        """Let ``model`` answer from now on."""
        self._status = _Status("ready", "", model, plan)

    def fail(self, reason: str, public: str = "") -> str:
        """Note that a load failed. The previous generation goes on answering; without one, the slot is unavailable.

        ``reason`` is for the log. ``public``, or else ``reason``, is for the status page, the repository's index and
        the caller: it is returned. Both are cut to a readable length, whatever names an artifact contains.
        """
        reason = brief(reason, LONGEST_REASON)
        public = public or reason
        if self._status.model is not None:
            _log.error("%s: the previously loaded version still serves; its replacement failed: %s", self.label, reason)
            text = f"the previously loaded version still serves; its replacement failed: {public}"
            self._status = replace(self._status, reason=text)
            self.series.replacement_failed(True)
            return public
        _log.error("%s is unavailable: %s", self.label, reason)
        self.series.ready(False)
        self._status = _Status("unavailable", public)
        return public

    def set_aside(self, plan: Plan, reason: str) -> Generation | None:
        """Note that ``plan`` is not loaded here, for ``reason``, and that the server need not wait for it.

        Returns the generation that answered, if any, for closing.
        """
        self.tried, self.awaited = plan, False
        self.series.ready(False)
        self.series.replacement_failed(False)
        return self.withdraw(reason)

    def withdraw(self, reason: str) -> Generation | None:
        """Let nothing answer from now on. Returns the generation that did, for closing."""
        model, self._status = self._status.model, _Status("unavailable", reason)
        return model
