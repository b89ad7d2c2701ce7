"""The process that has the fp32 references, and measures what is handed to it. ``python -m`` starts it.

Alone in loading them, for a reference takes twice the memory of what serves; of low priority, so that whoever answers
requests goes first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from bf16kit.errors import ArtifactError, Bf16kitError, NotFound
from bf16kit.orphans import end_with
from service.drift.evidence import Witness
from service.drift.sampling import TokenBucket
from service.drift.shadow import NICENESS, Shadow
from service.drift.verdict import DriftVerdict
from service.models.comparing import new_comparison
from service.models.directory import stamp_of
from service.models.opening import Opened, open_artifact
from service.models.plan import Wish
from service.peers.channel import Body, Channel
from service.peers.peer import TELL_SECONDS, Message, Peer
from service.peers.signals import leave_signals_to_the_parent
from service.process.heap import HeapTrimmer, bound_heap
from service.process.logs import configure
from service.process.ticking import Ticking
from service.shadow.board import Board, Key, label_of
from service.shadow.fetching import KIND, answer
from service.shadow.measured import Measured, Outcomes
from service.shadow.memory import Memory
from service.shadow.opening import open_reference
from service.shadow.samples import unpack
from service.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
MEASURED = "bf16kit_drift_"  # what is counted here; whoever answers counts everything else


class References:
    """Hears whoever leads on the peer's thread; opens artifacts on another; each model is measured on its own."""

    def __init__(self, end: socket.socket) -> None:
        self._metrics = Metrics()
        self._memory = Memory(limit=True)
        self._board = Board()  # of its own until it is told of the one that the server reads
        self._models: dict[Key, Measured] = {}
        self._lock = threading.RLock()  # what is told of a sample may come back here
        self._opening = ThreadPoolExecutor(1, "opening")
        self._ended = threading.Event()
        self._keeps_evidence = False
        self._reference_ca: Path | None = None
        handlers = {
            "start": self._start,
            "ping": lambda message: None,
            "measure": self._begin,
            "samples": self._sampled,
            "restart": self._restart,
            "forget": self._forget,
            KIND: lambda message: answer(message, self._evidence_of),
            "counts": lambda message: self._counts(),
        }
        self._peer = Peer(Channel(end), "the server", handlers, self._ended.set)

    def run(self) -> None:
        """Measure until the server ends or closes the channel. Never returns."""
        self._peer.start()
        HeapTrimmer().start()
        Ticking("counting", TELL_SECONDS, self._tell).start()
        self._ended.wait()
        os._exit(0)  # a reference may be at work, and nobody waits for what it says

    def _tell(self) -> None:
        self._peer.tell("counts", self._counts())
        with self._lock:
            models = list(self._models.values())
        for model in models:
            self._tell_verdict(model)

    def _counts(self) -> Body:
        return {"metrics": [family.as_json() for family in self._metrics.snapshot(MEASURED)], "statistics": []}

    def _evidence_of(self, name: str, version: int) -> bytes:
        """Raises NotFound where there is none."""
        with self._lock:
            model = self._models.get((name, version))
        if model is None or model.witness is None:
            raise NotFound(
                f"model {name!r} version {version}: no live sample has been measured, so there is no evidence"
            )
        return model.witness.evidence(model.files).dumps()

    # --- what it is told ----------------------------------------------------------------------------------------------

    def _start(self, message: Message) -> None:
        configure(message.body["log_level"], message.body["log_format"])
        self._keeps_evidence = message.body["evidence"]
        if (path := message.body["reference_ca"]) is not None:
            self._reference_ca = Path(path)
        self._board = Board(message.files[0], one_by_one=message.body["one_by_one"])

    def _begin(self, message: Message) -> None:
        with self._lock:
            self._model(message.body["wish"])

    def _sampled(self, message: Message) -> Future[Body]:
        body = message.body
        samples = unpack(body, message.files[0])
        outcomes = Outcomes(len(samples))
        with self._lock:
            model = self._model(body["wish"])
            for at, sample in enumerate(samples):
                if body["shared"] and not model.tokens.take():  # each that chooses keeps to the rate, all do here
                    outcomes.told(at, "dropped")
                else:
                    model.put(sample, partial(outcomes.told, at))
        return outcomes.answer

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
        return self._counts()

    # --- models, with the lock held -----------------------------------------------------------------------------------

    def _model(self, text: str) -> Measured:
        """What measures the samples of this wish, in place of what measured another of the same version."""
        known = next((model for model in self._models.values() if model.wish == text), None)
        if known is not None:
            return known
        wish = Wish.from_json(text)
        (plan,) = wish.plans
        key = wish.name, plan.version
        known = self._models.get(key)
        if known is not None and known.plan == plan:
            return known
        if known is not None:
            self._close(known)
        tokens = TokenBucket(plan.serving.shadow.max_per_second)
        model = Measured(text, plan, self._metrics.add(*key), tokens)
        model.metrics.reference_up(False)
        self._models[key] = model
        self._opening.submit(self._open, key, model)
        return model

    def _close(self, model: Measured) -> None:
        """Its thread gives the reference back after the sample that it is at."""
        model.failed = True
        early, model.early = model.early, []
        for each in early:
            each.told("dropped")
        if model.shadow is not None:
            model.shadow.stop()

    # --- on other threads ---------------------------------------------------------------------------------------------

    def _open(self, key: Key, model: Measured) -> None:
        label = label_of(key)
        try:
            with self._board.at_work(label, "loading"):
                opened = self._opened(model)
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
                each.told("failed")
            return
        with self._lock:
            if model.failed:  # forgotten meanwhile
                return
            model.shadow = shadow
            shadow.start()
            early, model.early = model.early, []
            for each in early:
                shadow.put(each.sample, each.told)

    def _opened(self, model: Measured) -> Opened:
        if stamp_of(model.plan.path) != model.plan.stamp:
            raise ArtifactError("its files are others than those that were loaded")
        return open_artifact(model.plan.path, model.plan.serving)

    def _new_shadow(self, key: Key, model: Measured, opened: Opened) -> Shadow:
        name = label_of(key)
        comparison = new_comparison(*key, opened)
        if self._keeps_evidence:
            model.witness = Witness(comparison, opened.batch_axis, opened.budget)
            model.files = {file: entry.sha256 for file, entry in opened.artifact.manifest.files.items()}
        return Shadow(
            lambda: open_reference(name, model.policy, opened, self._memory, self._board, self._reference_ca),
            model.witness or comparison,
            model.policy,
            model.metrics,
            name=name,
            measured=lambda: self._judge(model, comparison.verdict),
        )

    def _judge(self, model: Measured, verdict: Callable[[], DriftVerdict]) -> None:
        """After each sample: what is news is told at once, the rest with the counts."""
        model.verdict = verdict().of(model.digest)
        if model.told is None or model.verdict.told != model.told.told:
            self._tell_verdict(model)

    def _tell_verdict(self, model: Measured) -> None:
        with self._lock:
            verdict, live = model.verdict, model in self._models.values()
            news = live and verdict is not None and verdict is not model.told
            model.told = verdict
        if news and verdict is not None:
            self._peer.tell("verdict", verdict.to_json())


def run_when_idle() -> None:
    """This process, the threads that it starts included, after everything else that wants a processor.

    Niceness alone shares a processor fairly: a thread that answers and wakes up waits until this one's turn is over
    (docs/decisions/0055). Nobody who answers waits for a lock that is held here.
    """
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    """``python -m service.shadow.references DESCRIPTOR PARENT``."""
    leave_signals_to_the_parent()
    end_with(int(sys.argv[2]))
    run_when_idle()
    bound_heap()
    References(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
