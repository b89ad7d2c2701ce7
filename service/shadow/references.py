"""The process with the fp32 references, which measures the samples it is sent. Started with ``python -m``.

It loads them apart from the serving processes because a reference takes twice the memory of the bf16 model. The
threads that measure have a low priority, so that processes that answer requests run first.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from bf16kit.messages.errors import ArtifactError, Bf16kitError, NotFound
from service.config.logs import configure
from service.config.periodic import PeriodicThread
from service.config.resources import HeapTrimmer, bound_heap
from service.drift.breachevidence import EvidenceRecorder
from service.drift.sampler import OnOutcome, Outcome, Sample, TokenBucket
from service.drift.shadow import MAX_BYTES, QUEUE_SIZE, Reference, Shadow
from service.drift.verdict import DriftVerdict
from service.models.directory import stamp_of
from service.models.opened import OpenedArtifact, new_comparison, open_artifact
from service.models.plan import DesiredModel, Plan
from service.peers.channel import Body, Channel, to_json
from service.peers.child import socket_to_parent
from service.peers.peer import Message, Peer
from service.shadow.process import Key, label_of, no_evidence
from service.shadow.referencememory import ReferenceMemory, fp32_bytes
from service.shadow.samples import unpack
from service.telemetry.metrics import Metrics
from service.telemetry.modelmetrics import ModelMetrics

_log = logging.getLogger(__name__)
_VERDICT_SECONDS = 1.0  # between two verdicts of the same status
MEASURED = "bf16kit_drift_"  # prefix of the metrics counted here; serving processes count the others


@dataclass(eq=False)
class _MeasuredVersion:
    """A version whose samples are measured."""

    plan: Plan  # without labels
    digest: str  # of the plan with them, which samples and verdicts name
    metrics: ModelMetrics
    tokens: TokenBucket
    early: list[tuple[Sample, OnOutcome]] = field(
        default_factory=list
    )  # samples that came before its artifact was open
    loaded: Future[Body] = field(default_factory=Future)  # ends once its reference is loaded, or will not be
    shadow: Shadow | None = None
    failed: bool = False
    verdict: DriftVerdict | None = None  # the newest
    reported: DriftVerdict | None = None  # the last verdict that the server was sent
    recorder: EvidenceRecorder | None = None  # set if evidence is kept

    def put(self, sample: Sample, on_outcome: OnOutcome) -> None:
        """Queue a sample; see :meth:`Shadow.put`. The caller holds the lock."""
        if self.failed:
            on_outcome("failed")
        elif self.shadow is not None:
            self.shadow.put(sample, on_outcome)
        elif len(self.early) < QUEUE_SIZE and sum(each.nbytes for each, _ in self.early) + sample.nbytes <= MAX_BYTES:
            self.early.append((sample, on_outcome))
        else:
            on_outcome("dropped")

    def fail(self, outcome: Outcome) -> None:
        """Measure nothing more. Early samples have this outcome. The caller holds the lock."""
        self.failed = True
        early, self.early = self.early, []
        for _, on_outcome in early:
            on_outcome(outcome)
        if self.shadow is not None:
            self.shadow.stop()  # its thread frees the reference after its current sample
        if not self.loaded.done():
            self.loaded.set_result({})


class References:
    """Measures samples for the leading process: handles its messages on the peer's thread, opens artifacts on another.

    Each model is measured on a thread of its own.
    """

    def __init__(self, end: socket.socket) -> None:
        self._metrics = Metrics()
        self._memory = ReferenceMemory()
        self._models: dict[Key, _MeasuredVersion] = {}
        self._lock = threading.RLock()  # reporting a sample's outcome may call back into this class
        self._opening = ThreadPoolExecutor(1, "opening")
        self._ended = threading.Event()
        self._keeps_evidence = False
        handlers = {
            "start": self._start,
            "ping": lambda message: None,
            "measure": self._measure,
            "samples": self._receive_samples,
            "restart": self._restart,
            "forget": self._forget,
            "evidence": self._send_evidence,
            "counts": lambda message: self._counts(),
        }
        self._peer = Peer(Channel(end), "the server", handlers, self._ended.set)

    def run(self) -> None:
        """Measure until the server ends or closes the channel. Never returns."""
        self._peer.start()
        HeapTrimmer().start()
        PeriodicThread("verdicts", _VERDICT_SECONDS, self._report).start()
        self._ended.wait()
        os._exit(0)  # a reference may be running, and its result is not needed

    def _report(self) -> None:
        with self._lock:
            models = list(self._models.values())
        for model in models:
            self._report_verdict(model)

    def _counts(self) -> Body:
        families, complete = self._metrics.report(MEASURED)
        return {"metrics": [family.as_json() for family in families], "complete": complete, "statistics": []}

    # --- messages from the server -------------------------------------------------------------------------------------

    def _start(self, message: Message) -> None:
        configure(message.body["log_level"], message.body["log_format"])
        self._keeps_evidence = message.body["evidence"]

    def _measure(self, message: Message) -> Future[Body]:
        """Measure a version, in place of the same version loaded by another plan.

        Answers once its reference is loaded, or will not be.
        """
        desired, digest = DesiredModel.from_json(message.body["desired"]), message.body["plan"]
        (plan,) = desired.plans
        key = desired.name, plan.version
        with self._lock:
            known = self._models.get(key)
            if known is not None and known.digest == digest:
                return known.loaded
            if known is not None:
                known.fail("dropped")
            tokens = TokenBucket(plan.serving.shadow.max_per_second)
            model = self._models[key] = _MeasuredVersion(plan, digest, self._metrics.add(*key), tokens)
            model.metrics.reference_up(False)
            self._opening.submit(self._open, key, model)
        return model.loaded

    def _receive_samples(self, message: Message) -> Future[Body]:
        body = message.body
        samples = unpack(body, message.files[0])
        outcomes = Outcomes(len(samples))
        with self._lock:
            model = self._models.get((body["model"], body["version"]))
            for at, sample in enumerate(samples):
                if model is None or model.digest != body["plan"]:
                    outcomes.record(at, "dropped")  # another has been loaded in its place
                # Each sender keeps to the rate; this enforces it for all together.
                elif body["shared"] and not model.tokens.try_acquire():
                    outcomes.record(at, "dropped")
                else:
                    model.put(sample, partial(outcomes.record, at))
        return outcomes.response

    def _restart(self, message: Message) -> None:
        with self._lock:
            model = self._models.get((message.body["model"], message.body["version"]))
            if model is not None and model.shadow is not None:
                model.shadow.restart()

    def _forget(self, message: Message) -> Body:
        with self._lock:
            for name, version in message.body["keys"]:
                if (model := self._models.pop((name, version), None)) is not None:
                    model.fail("dropped")
                    self._metrics.remove(model.metrics)
        # All of them, changed or not: the server keeps series of references that this process never had.
        return {"metrics": [family.as_json() for family in self._metrics.snapshot(MEASURED)], "complete": True}

    def _send_evidence(self, message: Message) -> Body:
        """Write a version's evidence to the file sent with the message. Raises NotFound if there is none."""
        name, version = message.body["model"], int(message.body["version"])
        with self._lock:
            model = self._models.get((name, version))
        if model is None or model.recorder is None:
            raise NotFound(no_evidence(name, version))
        data = model.recorder.evidence(label_of((name, version))).dumps()
        with os.fdopen(os.dup(message.files[0]), "wb") as file:
            file.write(data)
        return {"bytes": len(data)}

    # --- on other threads ---------------------------------------------------------------------------------------------

    def _open(self, key: Key, model: _MeasuredVersion) -> None:
        try:
            if stamp_of(model.plan.path) != model.plan.stamp:
                raise ArtifactError("its files have changed since it was loaded")
            opened = open_artifact(model.plan.path, model.plan.serving)
            model.metrics.opened(opened.weight_bytes, opened.outputs)
            shadow = self._new_shadow(key, model, opened)
            with self._lock:
                if model.failed:  # forgotten meanwhile
                    return
                shadow.start()
                model.shadow = shadow
                while model.early:
                    shadow.put(*model.early[0])
                    model.early.pop(0)
        except Exception as error:  # noqa: BLE001 -- whoever waits for what becomes of a sample must be told
            expected = isinstance(error, (Bf16kitError, OSError))
            _log.error("%s: no live drift: %s", label_of(key), error, exc_info=not expected)
            with self._lock:
                model.fail("failed")

    def _new_shadow(self, key: Key, model: _MeasuredVersion, opened: OpenedArtifact) -> Shadow:
        comparison = new_comparison(*key, opened)
        if self._keeps_evidence:
            files = {file: entry.sha256 for file, entry in opened.artifact.manifest.files.items()}
            model.recorder = EvidenceRecorder(opened.batch_axis, opened.budget, files)
        return Shadow(
            lambda: self._load(key, model, opened),
            comparison,
            model.metrics,
            name=label_of(key),
            recorder=model.recorder,
            on_measured=lambda: self._update_verdict(model, comparison.verdict),
        )

    def _load(self, key: Key, model: _MeasuredVersion, opened: OpenedArtifact) -> Reference:
        """Load a version's reference, on its own thread.

        Raises ConfigError for want of memory, and whatever loading raises.
        """
        from bf16kit.runtime.loading import load_reference
        from bf16kit.runtime.memory import weights as _weights  # noqa: F401 -- now: what the
        from bf16kit.runtime.ort import onnx as _onnx  # noqa: F401 -- libraries take is no reference's

        _log.info("%s: its fp32 reference is being loaded", label_of(key))  # first, in case loading ends the process
        try:
            weights = fp32_bytes(opened.artifact.manifest)
            return self._memory.load(
                label_of(key), weights, lambda store: load_reference(opened.artifact, threads=1, weights=store)
            )
        finally:
            with self._lock:
                if not model.loaded.done():
                    model.loaded.set_result({})

    def _update_verdict(self, model: _MeasuredVersion, verdict: Callable[[], DriftVerdict]) -> None:
        """Update the verdict after each sample.

        Changes are reported at once, everything else once a second.
        """
        model.verdict = replace(verdict(), plan=model.digest)
        if model.reported is None or model.verdict.status != model.reported.status:
            self._report_verdict(model)

    def _report_verdict(self, model: _MeasuredVersion) -> None:
        with self._lock:
            verdict, live = model.verdict, model in self._models.values()
            news = live and verdict is not None and verdict is not model.reported
            model.reported = verdict
            if news and verdict is not None:  # within the lock, so that the newest is the last; it does not block
                self._peer.tell("verdict", to_json(verdict))


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


def main() -> None:
    """Entry point: ``python -m service.shadow.references DESCRIPTOR PARENT``."""
    bound_heap()
    References(socket_to_parent()).run()


if __name__ == "__main__":
    main()
