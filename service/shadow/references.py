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
from functools import partial
from pathlib import Path

from bf16kit.messages.errors import ArtifactError, Bf16kitError, NotFound
from service.config.heap import HeapTrimmer, bound_heap
from service.config.logs import configure
from service.config.periodic import PeriodicThread
from service.drift.evidence import EvidenceRecorder
from service.drift.sampling import TokenBucket
from service.drift.shadow import Shadow
from service.drift.verdict import DriftVerdict
from service.models.directory import stamp_of
from service.models.livecomparison import new_comparison
from service.models.opening import OpenedArtifact, open_artifact
from service.models.plan import DesiredModel
from service.peers.channel import Body, Channel
from service.peers.child import socket_to_parent
from service.peers.peer import Message, Peer
from service.shadow.activity import ActivityTracker, Key, label_of
from service.shadow.fetching import EVIDENCE, send_evidence
from service.shadow.measuredversion import MeasuredVersion, Outcomes
from service.shadow.memory import ReferenceMemory
from service.shadow.opening import open_reference
from service.shadow.samples import unpack
from service.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
_VERDICT_SECONDS = 1.0  # between two verdicts of the same status
MEASURED = "bf16kit_drift_"  # prefix of the metrics counted here; serving processes count the others


class References:
    """Measures samples for the leading process: handles its messages on the peer's thread, opens artifacts on another.

    Each model is measured on a thread of its own.
    """

    def __init__(self, end: socket.socket) -> None:
        self._metrics = Metrics()
        self._memory = ReferenceMemory(limit=True)
        self._tracker = ActivityTracker()  # private until the server sends the shared one
        self._models: dict[Key, MeasuredVersion] = {}
        self._lock = threading.RLock()  # reporting a sample's outcome may call back into this class
        self._opening = ThreadPoolExecutor(1, "opening")
        self._ended = threading.Event()
        self._keeps_evidence = False
        self._reference_ca: Path | None = None
        handlers = {
            "start": self._start,
            "ping": lambda message: None,
            "measure": self._measure,
            "samples": self._receive_samples,
            "restart": self._restart,
            "forget": self._forget,
            EVIDENCE: lambda message: send_evidence(message, self._evidence_of),
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

    def _evidence_of(self, name: str, version: int) -> bytes:
        """Raises NotFound if there is none."""
        with self._lock:
            model = self._models.get((name, version))
        if model is None or model.recorder is None:
            raise NotFound(
                f"model {name!r} version {version}: no live sample has been measured, so there is no evidence"
            )
        return model.recorder.evidence(model.files).dumps()

    # --- messages from the server -------------------------------------------------------------------------------------

    def _start(self, message: Message) -> None:
        configure(message.body["log_level"], message.body["log_format"])
        self._keeps_evidence = message.body["evidence"]
        if (path := message.body["reference_ca"]) is not None:
            self._reference_ca = Path(path)
        self._tracker = ActivityTracker(message.files[0], one_by_one=message.body["one_by_one"])
        self._peer.tell("counts", self._counts())  # from now on it answers when it is asked

    def _measure(self, message: Message) -> None:
        """Measure a version. It replaces the same version loaded by another plan."""
        desired, digest = DesiredModel.from_json(message.body["desired"]), message.body["plan"]
        (plan,) = desired.plans
        key = desired.name, plan.version
        with self._lock:
            known = self._models.get(key)
            if known is not None and known.digest == digest:
                return
            if known is not None:
                self._close(known)
            tokens = TokenBucket(plan.serving.shadow.max_per_second)
            model = MeasuredVersion(plan, digest, self._metrics.add(*key), tokens)
            model.metrics.reference_up(False)
            self._models[key] = model
            self._opening.submit(self._open, key, model)

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
                    self._close(model)
                    self._metrics.remove(model.metrics)
        # All of them, changed or not: the server keeps series of references that are off, which this process never had.
        return {"metrics": [family.as_json() for family in self._metrics.snapshot(MEASURED)], "complete": True}

    # --- models, with the lock held -----------------------------------------------------------------------------------

    def _close(self, model: MeasuredVersion) -> None:
        """Stop measuring a model. Its thread frees the reference after its current sample."""
        model.failed = True
        early, model.early = model.early, []
        for each in early:
            each.on_outcome("dropped")
        if model.shadow is not None:
            model.shadow.stop()

    # --- on other threads ---------------------------------------------------------------------------------------------

    def _open(self, key: Key, model: MeasuredVersion) -> None:
        label = label_of(key)
        try:
            with self._tracker.track(label, "loading"):
                opened = self._open_unchanged(model)
            model.metrics.opened(opened.weight_bytes, opened.outputs)
            shadow = self._new_shadow(key, model, opened)
        except Exception as error:  # noqa: BLE001 -- whoever waits for what becomes of a sample must be told
            if isinstance(error, (Bf16kitError, OSError)):
                _log.error("%s: no live drift: %s", label, error)
            else:
                _log.exception("%s: no live drift", label)
            with self._lock:
                model.failed = True
                early, model.early = model.early, []
            for each in early:
                each.on_outcome("failed")
            return
        with self._lock:
            if model.failed:  # forgotten meanwhile
                return
            model.shadow = shadow
            shadow.start()
            early, model.early = model.early, []
            for each in early:
                shadow.put(each.sample, each.on_outcome)

    def _open_unchanged(self, model: MeasuredVersion) -> OpenedArtifact:
        if stamp_of(model.plan.path) != model.plan.stamp:
            raise ArtifactError("its files have changed since it was loaded")
        return open_artifact(model.plan.path, model.plan.serving)

    def _new_shadow(self, key: Key, model: MeasuredVersion, opened: OpenedArtifact) -> Shadow:
        name = label_of(key)
        comparison = new_comparison(*key, opened)
        if self._keeps_evidence:
            model.recorder = EvidenceRecorder(comparison, opened.batch_axis, opened.budget)
            model.files = {file: entry.sha256 for file, entry in opened.artifact.manifest.files.items()}
        return Shadow(
            lambda: open_reference(name, model.policy, opened, self._memory, self._tracker, self._reference_ca),
            model.recorder or comparison,
            model.policy,
            model.metrics,
            name=name,
            on_measured=lambda: self._update_verdict(model, comparison.verdict),
        )

    def _update_verdict(self, model: MeasuredVersion, verdict: Callable[[], DriftVerdict]) -> None:
        """Update the verdict after each sample.

        Changes are reported at once, everything else once a second.
        """
        model.verdict = verdict().with_plan(model.digest)
        if model.reported is None or model.verdict.status != model.reported.status:
            self._report_verdict(model)

    def _report_verdict(self, model: MeasuredVersion) -> None:
        with self._lock:
            verdict, live = model.verdict, model in self._models.values()
            news = live and verdict is not None and verdict is not model.reported
            model.reported = verdict
        if news and verdict is not None:
            self._peer.tell("verdict", verdict.to_json())


def main() -> None:
    """Entry point: ``python -m service.shadow.references DESCRIPTOR PARENT``."""
    bound_heap()
    References(socket_to_parent()).run()


if __name__ == "__main__":
    main()
