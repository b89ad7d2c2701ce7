"""A worker: the gRPC port and the models, led by a supervisor. Started with ``python -m``."""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bf16kit.messages.errors import Bf16kitError, Unavailable
from bf16kit.system.exit_with_parent import exit_with_parent
from service.config.credentials import Credentials
from service.config.heap import HeapTrimmer, bound_heap
from service.config.logs import configure
from service.config.logsettings import LogSettings
from service.config.serverconfig import ServerConfig
from service.config.stop import Ending
from service.drift.gate import ProcessRank
from service.drift.owner import PrecisionOrder
from service.leader import new_table
from service.models.plan import DesiredModel
from service.models.repository import Repository
from service.operations import Operations, Settings
from service.peers.channel import Body, Channel
from service.peers.peer import ENDED, Message, Peer
from service.peers.signals import leave_signals_to_the_parent
from service.peers.textfile import read_text
from service.server import build_transport, drain, extensions, open_tracing, read_only_unless_enabled
from service.shadow.samplesender import PlanSampleSender
from service.telemetry.metrics import Metrics
from service.workers.description import describe
from service.workers.placement import threads_of
from service.workers.proxies import ControlProxy, ModelsProxy, SettingsProxy, settings_from_json
from service.workers.regions import WorkerRegions
from service.workers.registry import LatestView, MergedRegistry
from service.workers.statistics import as_json
from service.workers.view import Report, SlotState, View
from service.workers.weights import SharedWeights

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracing

_log = logging.getLogger(__name__)
_LAST_WORDS_SECONDS = 5.0  # for the supervisor to receive the last answer
_LAST_TRACES_SECONDS = 1.0
_POLL_SECONDS = 0.1
_EXIT_WRONG = 2


@dataclass(frozen=True, slots=True)
class _Start:
    config: ServerConfig
    patient: bool  # listen only once everything is loaded, because other workers serve meanwhile
    metrics: Metrics
    repository: Repository
    registry: MergedRegistry
    operations: Operations
    tracing: Tracing | None


@dataclass(frozen=True, slots=True)
class _Drain:
    seconds: float
    done: Future[Body]


class Worker:
    """Receives the supervisor's messages on one thread, and acts on them on the main one: :meth:`run`."""

    def __init__(self, end: socket.socket) -> None:
        self._starts: queue.SimpleQueue[_Start] = queue.SimpleQueue()
        self._drains: queue.SimpleQueue[_Drain] = queue.SimpleQueue()
        self._latest_view = LatestView()
        self._repository: Repository | None = None
        self._regions: WorkerRegions | None = None  # set at the start if shared memory is on
        self._metrics: Metrics | None = None
        self._settings: dict[str, Settings] = {}
        self._listening = False
        self._settled = threading.Event()  # nothing is being loaded
        self._reporting = threading.Lock()
        self._peer = Peer(
            Channel(end),
            "the supervisor",
            {
                "start": self._start,
                "want": self._apply,
                "settings": self._set,
                "counts": lambda message: self._counts(),
                "view": self._on_view,
                "ping": lambda message: None,
                "retire": self._retire,
                "drain": self._drain,
                "precision": self._remember,
                "switch": self._switch,
                "transition": self._transition,
                "adopt": self._adopt,
                "forget": self._forget,
            },
            lambda: os._exit(1),  # without a supervisor this must not keep the port: the next server needs it
        )

    def run(self) -> None:
        """Serve until told to drain. Never returns: threads may still be inside native code."""
        self._peer.start()
        start = self._starts.get()
        with _ending_on_error():
            self._serve(start)

    def _serve(self, start: _Start) -> None:
        config, repository = start.config, start.repository
        transport = build_transport(
            config,
            start.registry,
            start.metrics.refused,
            Credentials.of(config),
            start.operations,
            start.tracing,
        )
        repository.subscribe(self._report)
        repository.start()
        self._report()
        while start.patient and not self._settled.wait(_POLL_SECONDS) and self._drains.empty():
            pass  # a connection to this worker would only learn that models are loading
        transport.start()
        self._listening = True
        self._report()
        if start.tracing is not None:
            start.tracing.start()
        heap = HeapTrimmer()
        heap.start()
        order = self._drains.get()
        heap.stop()
        ending = drain(repository, transport, order.seconds)
        if start.tracing is not None:
            start.tracing.close(_LAST_TRACES_SECONDS)
        self._peer.tell("counts", self._counts())  # the last, because nobody can ask any more
        self._end(order, ending)

    def _end(self, order: _Drain, ending: Ending) -> None:
        order.done.set_result({"answered": ending.completed, "freed": ending.threads_ended})
        logging.shutdown()
        # The supervisor closes the channel when it has the answer, which ends this process.
        time.sleep(_LAST_WORDS_SECONDS)
        os._exit(0)

    def _report(self) -> None:
        """Report this worker's state to the supervisor. For any thread; the last report has the newest state."""
        repository = self._repository
        if repository is None:
            return
        with self._reporting:
            slots = []
            for slot in repository.models():
                model = slot.model
                described = None if model is None else describe(model)
                slots.append(SlotState(slot.name, slot.version, slot.state, slot.reason, described))
            if any(slot.state == "loading" for slot in slots):
                self._settled.clear()
            else:
                self._settled.set()
            self._peer.tell("report", Report(self._listening, repository.ready, tuple(slots)).as_json())

    # --- on the peer's thread -----------------------------------------------------------------------------------------

    def _start(self, message: Message) -> None:
        with _ending_on_error():  # the main thread would wait for its start for ever
            self._prepare(message)

    def _prepare(self, message: Message) -> None:
        body, config, metrics = message.body, ServerConfig(**message.body["config"]), Metrics()
        configure(config.log_level, config.log_format, worker=body["number"])
        weights = SharedWeights(socket.socket(fileno=os.dup(message.files[0])))
        repository = Repository(
            metrics,
            device=config.device,
            threads=threads_of(config.threads, config.workers),
            weights=weights,
            ready_when_empty=config.model_control == "explicit",
            new_sender=lambda name, plan: PlanSampleSender(name, plan, self._peer.ask),
            on_verdict=lambda verdict: self._peer.tell("verdict", verdict.to_json()),
            rank=ProcessRank(body["number"] - 1, config.workers),
        )
        repository.apply_all(map(DesiredModel.from_json, json.loads(read_text(message.files[1]))))
        registry = MergedRegistry(repository, self._latest_view)
        traces, tracing = open_tracing(config, repository, metrics.traced)
        if config.shared_memory:
            self._regions = WorkerRegions(new_table(config), self._peer.ask)
        self._settings = {"logs": LogSettings(config.log_level, config.log_format), "traces": traces}
        self._repository, self._metrics = repository, metrics
        operations = self._operations(config, registry)
        self._starts.put(_Start(config, body["patient"], metrics, repository, registry, operations, tracing))

    def _operations(self, config: ServerConfig, registry: MergedRegistry) -> Operations:
        ask = self._peer.ask
        return Operations(
            models=ModelsProxy(registry, ask),
            control=ControlProxy(ask) if config.model_control == "explicit" else None,
            regions=self._regions,
            logs=read_only_unless_enabled(config, SettingsProxy(self._settings["logs"], "logs", ask)),
            traces=read_only_unless_enabled(config, SettingsProxy(self._settings["traces"], "traces", ask)),
            extensions=extensions(config, explicit=config.model_control == "explicit"),
        )

    def _apply(self, message: Message) -> Any:
        return self._served.apply(DesiredModel.from_json(read_text(message.files[0])))

    def _set(self, message: Message) -> Body:
        body, _ = message.body, self._served
        now = self._settings[body["what"]].update(settings_from_json(body["changes"]), body["model"])
        return {"settings": {name: list(values) for name, values in now.items()}}

    def _remember(self, message: Message) -> None:
        """Store an order, which is carried out once its model is loaded."""
        self._served.order(PrecisionOrder.from_json(message.body))

    def _switch(self, message: Message) -> Any:
        return self._served.order(PrecisionOrder.from_json(message.body))

    def _transition(self, message: Message) -> None:
        self._served.transition(message.body["model"], message.body["version"], message.body["to"])

    def _counts(self) -> Body:
        models = [model for slot in self._served.models() if (model := slot.model) is not None]
        statistics = {(model.name, model.version): model.statistics.snapshot() for model in models}
        assert self._metrics is not None  # noqa: S101 -- nothing is asked before the start
        families, complete = self._metrics.report()
        return {
            "metrics": [family.as_json() for family in families],
            "complete": complete,
            "statistics": as_json(statistics),
        }

    @property
    def _served(self) -> Repository:
        if self._repository is None:
            raise Unavailable("this worker is being started; try again", ENDED)  # it will be sent what is wanted
        return self._repository

    def _on_view(self, message: Message) -> None:
        self._latest_view.change(View.from_json(message.body))

    def _adopt(self, message: Message) -> None:
        if self._regions is not None:  # otherwise it is sent again after the start
            self._regions.adopt(message)

    def _forget(self, message: Message) -> None:
        if self._regions is not None:
            self._regions.forget(message)

    def _retire(self, message: Message) -> None:
        if self._repository is not None:
            self._repository.retire()

    def _drain(self, message: Message) -> Future[Any]:
        done: Future[Any] = Future()
        self._drains.put(_Drain(message.body["seconds"], done))
        return done


@contextmanager
def _ending_on_error() -> Iterator[None]:
    """Log what is raised and end the process, so that the supervisor starts another after a pause."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 -- a process that serves nothing must not remain
        if isinstance(error, Bf16kitError):
            _log.error("%s", error)
        else:
            _log.exception("this worker ends: an unexpected error")
        logging.shutdown()
        os._exit(_EXIT_WRONG)


def main() -> None:
    """Entry point: ``python -m service.workers.worker DESCRIPTOR PARENT``."""
    leave_signals_to_the_parent()
    exit_with_parent(int(sys.argv[2]))
    bound_heap()
    Worker(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
