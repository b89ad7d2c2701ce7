"""Decides whether bf16 or fp32 answers for a model: the decision alone, from verdicts and a clock.

    bf16 ── over the budget beyond chance ────▶ warming ── the reference is loaded and warm ──▶ fp32
      ▲                                            │ it cannot be loaded                          │
      └────────────────────────────────────────────┘                                              │
      └── a minimum stay is over, and enough clean samples are clearly below the budget ──────────┘

A model near its budget does not flap. It falls back when drift is over the budget beyond chance, and returns when the
95 % interval lies below the budget by a margin. A model that falls back again stays twice as long.
"""

from __future__ import annotations

from typing import Literal

from service.drift.fallbackpolicy import FallbackPolicy
from service.drift.verdict import DriftVerdict

Phase = Literal["bf16", "warming", "fp32"]
_CAUSE_TEXTS = {
    "rounding": "of the size that rounding explains",
    "broken": "more than rounding explains: something is broken",
}


class Fallback:
    """The phase of one generation of a model. Times are seconds of one clock, which the caller reads.

    ``reason`` explains the phase to a person; it is empty if there is nothing to explain.
    """

    def __init__(self, policy: FallbackPolicy, now: float) -> None:
        self.phase: Phase = "bf16"
        self.reason = ""
        self._policy = policy
        self._since = now  # when this phase began
        self._over_at = now  # when a verdict "over" last came while fp32 answered
        self._fallbacks = 0  # falls to fp32 in a row
        self._retry_at = now

    @property
    def stay(self) -> float:
        """The minimum time that fp32 answers, in seconds, counted from when bf16 was last over its budget."""
        longest = self._policy.longest_stay_seconds
        return min(longest, self._policy.min_stay_seconds * 2.0 ** min(self._fallbacks - 1, 64))

    def receive(self, verdict: DriftVerdict, now: float) -> bool:
        """Apply a verdict. Return whether the phase or the reason changed."""
        if self._policy.policy == "off":
            return False
        if self.phase == "fp32":
            return self._return(verdict, now)
        if self.phase == "warming":
            return False
        if verdict.state == "over":
            return self._fall_back(verdict, now)
        if verdict.state == "within" and self.reason:
            self.reason = ""
            return True
        return False

    def warmed(self, now: float) -> None:
        """Enter phase fp32: the reference is loaded and answers from now on."""
        if now - self._since >= self._policy.longest_stay_seconds:
            self._fallbacks = 0
        self._fallbacks += 1
        self.phase, self._since, self._over_at = "fp32", now, now

    def failed(self, error: str, now: float) -> None:
        """Return to phase bf16, because fp32 cannot answer. A later verdict triggers the next attempt."""
        self.phase, self._retry_at = "bf16", now + self._policy.retry_seconds
        self.reason = f"{self.reason}; fp32 cannot answer: {error}"

    def _fall_back(self, verdict: DriftVerdict, now: float) -> bool:
        new = not self.reason
        if new:
            self.reason = describe(verdict)
        if self._policy.policy == "fp32" and now >= self._retry_at:
            self.phase, self.reason = "warming", describe(verdict)
            return True
        return new

    def _return(self, verdict: DriftVerdict, now: float) -> bool:
        if verdict.state == "over":
            self._over_at = now
        clean = (
            verdict.state == "within"
            and not verdict.changed
            and verdict.effective_samples >= self._policy.clean_samples
            and verdict.high < 1 - self._policy.margin
        )
        if not clean or now - self._over_at < self.stay:
            return False
        self.phase, self._since, self.reason = "bf16", now, ""
        return True


def describe(verdict: DriftVerdict) -> str:
    """Describe a breach: which bound is over, by how much, and the kind of fault it looks like."""
    if not verdict.metric:
        return "the golden samples can no longer be run"  # see service.drift.gate.breach_verdict
    text = (
        f"{verdict.metric} of output {verdict.output!r} is {verdict.ratio:.3g} times its budget"
        f" (95 %: {verdict.low:.3g} to {verdict.high:.3g}, {verdict.effective_samples:.0f} effective samples)"
    )
    return f"{text}, {_CAUSE_TEXTS[verdict.cause]}" if verdict.cause in _CAUSE_TEXTS else text
