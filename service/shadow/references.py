"""The process that has the fp32 references, and measures what all workers hand to it. ``python -m`` starts it.

Alone in loading them, for a reference takes twice the memory of what serves; of low priority, like the threads that do
this where one process serves.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from bf16kit.errors import ArtifactError, Bf16kitError
from service.drift.sampling import Sample
from service.drift.shadow import NICENESS, QUEUE_SIZE, Shadow
from service.models.directory import stamp_of
from service.models.generation import new_shadow
from service.models.opening import open_artifact
from service.models.plan import Plan, Wish
from service.peers.channel import Body, Channel
from service.peers.orphans import end_with, leave_signals_to_the_parent
from service.peers.peer import TELL_SECONDS, Message, Peer
from service.process.heap import HeapTrimmer, bound_heap
from service.process.logs import configure
from service.process.ticking import Ticking
from service.shadow.samples import unpack
from service.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
Key = tuple[str, int]  # a model's name, and its version
MEASURED = "bf16kit_drift_"  # what is counted here; the workers count everything else


@dataclass(eq=False)
class _Measured:
    """A version whose samples are measured. They wait here until its artifact is open."""

    plan: Plan
    waiting: deque[Sample] = field(default_factory=lambda: deque(maxlen=QUEUE_SIZE))
    shadow: Shadow | None = None
    failed: bool = False


class References:
    """Hears the supervisor on the peer's thread; opens artifacts on another; each model is measured on its own."""

    def __init__(self, end: socket.socket) -> None:
        self._metrics = Metrics()
        self._models: dict[Key, _Measured] = {}
        self._lock = threading.Lock()
        self._opening = ThreadPoolExecutor(1, "opening")
        self._ended = threading.Event()
        handlers = {
            "start": lambda message: configure(message.body["log_level"], message.body["log_format"]),
            "ping": lambda message: None,
            "sample": self._sample,
            "forget": self._forget,
            "counts": lambda message: self._counts(),
        }
        self._peer = Peer(Channel(end), "the supervisor", handlers, self._ended.set)

    def run(self) -> None:
        """Measure until the supervisor ends or closes the channel. Never returns."""
        self._peer.start()
        HeapTrimmer().start()
        Ticking("counting", TELL_SECONDS, lambda: self._peer.tell("counts", self._counts())).start()
        self._ended.wait()
        os._exit(0)  # a reference may be at work, and nobody waits for what it says

    def _counts(self) -> Body:
        return {"metrics": [family.as_json() for family in self._metrics.snapshot(MEASURED)], "statistics": []}

    def _sample(self, message: Message) -> Mapping[str, bool]:
        body = message.body
        wish = Wish.from_json(body["wish"])
        (plan,) = wish.plans
        sample, key = unpack(body, message.files[0]), (wish.name, plan.version)
        with self._lock:
            model = self._models.get(key)
            if model is None or model.plan != plan:
                if model is not None:
                    self._close(model)
                model = self._models[key] = _Measured(plan)
                self._opening.submit(self._open, key, model)
            if model.shadow is not None:
                return {"taken": model.shadow.put(sample)}
            taken = not model.failed and len(model.waiting) < QUEUE_SIZE and sample.nbytes <= self._room(model)
            if taken:
                model.waiting.append(sample)
        return {"taken": taken}

    def _room(self, model: _Measured) -> int:
        return model.plan.serving.shadow.max_bytes - sum(sample.nbytes for sample in model.waiting)

    def _open(self, key: Key, model: _Measured) -> None:
        name, version = key
        label, plan, metrics = f"model {name!r} version {version}", model.plan, self._metrics.add(name, version)
        try:
            if stamp_of(plan.path) != plan.stamp:
                raise ArtifactError("its files are others than those that were loaded")
            opened = open_artifact(plan.path, plan.serving)
            metrics.opened(opened.weight_bytes, opened.outputs)
            shadow = new_shadow(label, opened, plan.serving, metrics)
        except (Bf16kitError, OSError) as error:
            _log.error("%s: no live drift: %s", label, error)
            with self._lock:
                model.failed = True
                lost = sum(sample.rows for sample in model.waiting)
                model.waiting.clear()
            metrics.sampled("failed", lost)
            return
        shadow.start()
        with self._lock:
            model.shadow = shadow
            for sample in model.waiting:
                if not shadow.put(sample):
                    metrics.sampled("dropped", sample.rows)
            model.waiting.clear()

    def _forget(self, message: Message) -> None:
        with self._lock:
            for key in [key for key in self._models if key[0] == message.body["model"]]:
                self._close(self._models.pop(key))

    def _close(self, model: _Measured) -> None:
        """Its thread gives the reference back after the sample that it is at."""
        model.failed = True
        if model.shadow is not None:
            model.shadow.stop()


def main() -> None:
    """``python -m service.shadow.references DESCRIPTOR PARENT``."""
    leave_signals_to_the_parent()
    end_with(int(sys.argv[2]))
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    bound_heap()
    References(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
