"""The process with the fp32 references, which measures the samples it is sent. Started with ``python -m``.

It loads them apart from the serving processes because a reference takes twice the memory of the bf16 model. The
threads that measure have a low priority, so that processes that answer requests run first.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from bf16kit.messages.errors import ArtifactError, NotFound
from bf16kit.service.config.logs import configure
from bf16kit.service.config.loops import PeriodicThread
from bf16kit.service.config.resources import HeapTrimmer, bound_heap
from bf16kit.service.drift.breachevidence import EvidenceRecorder
from bf16kit.service.drift.contract import DriftVerdict
from bf16kit.service.drift.sampler import Outcome, TokenBucket
from bf16kit.service.drift.shadow import Measuring, Shadow
from bf16kit.service.models.opened import new_comparison, open_artifact
from bf16kit.service.models.plan import DesiredModel, Plan, stamp_of
from bf16kit.service.peers.channel import Body, Channel, to_json
from bf16kit.service.peers.child import socket_to_parent
from bf16kit.service.peers.peer import Message, Peer
from bf16kit.service.shadow.process import label_of, no_evidence
from bf16kit.service.shadow.referencememory import ReferenceMemory, fp32_bytes
from bf16kit.service.shadow.samples import Key, unpack
from bf16kit.service.telemetry.metrics import Metrics
from bf16kit.service.telemetry.modelmetrics import ModelMetrics
from bf16kit.service.telemetry.values import to_message

_log = logging.getLogger("bf16kit.service.shadow.references")  # __name__ is "__main__": it is run with -m
_VERDICT_SECONDS = 1.0  # between two verdicts of the same status
MEASURED = "drift_"  # prefix of the metrics counted here; serving processes count the others


@dataclass(eq=False)
class _MeasuredVersion:
    """A version whose samples are measured."""

    plan: Plan  # without labels
    digest: str  # of the plan with them, which samples and verdicts name
    metrics: ModelMetrics
    tokens: TokenBucket
    loaded: Future[Body] = field(default_factory=Future)  # ends once its reference is loaded, or will not be
    shadow: Shadow = field(init=False)
    verdict: DriftVerdict | None = None  # the newest
    reported: DriftVerdict | None = None  # the last verdict that the server was sent
    recorder: EvidenceRecorder | None = None  # set if evidence is kept

    def stop(self) -> None:
        """Measure nothing more. The caller holds the lock."""
        self.shadow.stop()  # its thread frees the reference after its current sample
        self.end_loading()

    def end_loading(self) -> None:
        """Answer whoever waits for the reference. The caller holds the lock."""
        if not self.loaded.done():
            self.loaded.set_result({})


class References:
    """Measures samples for the leading process: handles its messages on the peer's thread.

    Each model is loaded and measured on a thread of its own.
    """

    def __init__(self, end: socket.socket) -> None:
        self._metrics = Metrics()
        self._memory = ReferenceMemory()
        self._models: dict[Key, _MeasuredVersion] = {}
        self._lock = threading.RLock()  # reporting a sample's outcome may call back into this class
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
        return {"metrics": to_message(self._metrics.values(MEASURED))}

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
                known.stop()
            tokens = TokenBucket(plan.serving.shadow.max_per_second)
            model = self._models[key] = _MeasuredVersion(plan, digest, self._metrics.add(*key), tokens)
            model.metrics.reference_up(False)
            model.shadow = Shadow(
                partial(self._load, key, model),
                model.metrics,
                name=label_of(key),
                on_measured=partial(self._update_verdict, model),
            )
            model.shadow.start()
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
                    model.shadow.put(sample, partial(outcomes.record, at))
        return outcomes.response

    def _restart(self, message: Message) -> None:
        with self._lock:
            model = self._models.get((message.body["model"], message.body["version"]))
            if model is not None:
                model.shadow.restart()

    def _forget(self, message: Message) -> Body:
        with self._lock:
            for name, version in message.body["keys"]:
                if (model := self._models.pop((name, version), None)) is not None:
                    model.stop()
                    self._metrics.remove(model.metrics)
        return self._counts()

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

    def _load(self, key: Key, model: _MeasuredVersion) -> Measuring:
        """Open a version's artifact and load its reference, on its own thread.

        Raises ConfigError for want of memory, and whatever opening and loading raise.
        """
        from bf16kit.runtime.loading import load_reference
        from bf16kit.runtime.memory import weights as _weights  # noqa: F401 -- now: what the
        from bf16kit.runtime.ort import onnx as _onnx  # noqa: F401 -- libraries take is no reference's

        try:
            if stamp_of(model.plan.path) != model.plan.stamp:
                raise ArtifactError("its files have changed since it was loaded")
            opened = open_artifact(model.plan.path, model.plan.serving)
            artifact = opened.artifact
            model.metrics.opened(opened.weight_bytes, opened.outputs)
            if self._keeps_evidence:
                files = {file: entry.sha256 for file, entry in artifact.manifest.files.items()}
                model.recorder = EvidenceRecorder(opened.batch_axis, opened.budget, files)
            _log.info("%s: its fp32 reference is being loaded", label_of(key))  # now, in case that ends the process
            reference = self._memory.load(
                label_of(key),
                fp32_bytes(artifact.manifest),
                lambda store: load_reference(artifact, threads=1, weights=store),
            )
            return Measuring(reference, new_comparison(*key, opened), model.recorder)
        finally:
            with self._lock:
                model.end_loading()

    def _update_verdict(self, model: _MeasuredVersion, verdict: DriftVerdict) -> None:
        """Update the verdict after each sample.

        Changes are reported at once, everything else once a second.
        """
        model.verdict = replace(verdict, plan=model.digest)
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
    """Entry point: ``python -m bf16kit.service.shadow.references DESCRIPTOR PARENT``."""
    bound_heap()
    References(socket_to_parent()).run()


if __name__ == "__main__":
    main()
