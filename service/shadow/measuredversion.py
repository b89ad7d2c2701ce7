"""A model whose samples are measured, and the outcomes of samples."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from service.drift.breachevidence import EvidenceRecorder
from service.drift.driftpolicy import ShadowPolicy
from service.drift.sampler import Outcome, Sample, TokenBucket
from service.drift.shadow import MAX_BYTES, QUEUE_SIZE, OnOutcome, Shadow
from service.drift.verdict import DriftVerdict
from service.models.plan import Plan
from service.peers.channel import Body
from service.telemetry.modelmetrics import ModelMetrics


@dataclass(frozen=True, slots=True)
class EarlySample:
    """A sample that arrived before its artifact was open."""

    sample: Sample
    on_outcome: OnOutcome


@dataclass(eq=False)
class MeasuredVersion:
    """A version whose samples are measured."""

    plan: Plan  # without labels
    digest: str  # of the plan with them, which samples and verdicts name
    metrics: ModelMetrics
    tokens: TokenBucket
    early: list[EarlySample] = field(default_factory=list)
    shadow: Shadow | None = None
    failed: bool = False
    verdict: DriftVerdict | None = None  # the newest
    recorder: EvidenceRecorder | None = None  # set if evidence is kept
    files: Mapping[str, str] = field(default_factory=dict)  # the artifact's files and their sha256
    reported: DriftVerdict | None = None  # the last verdict that the server was sent

    @property
    def policy(self) -> ShadowPolicy:
        return self.plan.serving.shadow

    def put(self, sample: Sample, on_outcome: OnOutcome) -> None:
        """Queue a sample; see :meth:`Shadow.put`. The caller holds the lock."""
        if self.failed:
            on_outcome("failed")
        elif self.shadow is not None:
            self.shadow.put(sample, on_outcome)
        elif len(self.early) < QUEUE_SIZE and self._early_bytes + sample.nbytes <= MAX_BYTES:
            self.early.append(EarlySample(sample, on_outcome))
        else:
            on_outcome("dropped")

    @property
    def _early_bytes(self) -> int:
        return sum(each.sample.nbytes for each in self.early)


class Outcomes:
    """Collects the outcomes of samples that came in one message, and completes ``response`` once the last is known."""

    def __init__(self, count: int) -> None:
        self.response = Future[Body]()
        self._outcomes: list[Outcome | None] = [None] * count
        self._remaining = count
        self._lock = threading.Lock()

    def record(self, at: int, outcome: Outcome) -> None:
        with self._lock:
            self._outcomes[at] = outcome
            self._remaining -= 1
            last = not self._remaining
        if last:
            self.response.set_result({"outcomes": self._outcomes})
