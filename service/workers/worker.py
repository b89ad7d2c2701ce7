"""A worker: the gRPC port and the models, led by a supervisor. Started with ``python -m``."""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bf16kit.messages.errors import Bf16kitError, Unavailable
from service.config.certificates import Credentials
from service.config.logs import configure
from service.config.logsettings import LogSettings
from service.config.resources import HeapTrimmer, bound_heap
from service.config.serverconfig import ServerConfig
from service.drift.fallbackcontroller import PrecisionOrder
from service.drift.gate import ProcessRank
from service.leader import new_table
from service.models.plan import DesiredModel
from service.models.repository import Repository
from service.operations import Region, RegistryModels, Settings, VersionStatistics
from service.peers.channel import Body, Channel, from_json, read_text, to_json
from service.peers.child import socket_to_parent
from service.peers.peer import ENDED, Answer, Message, Peer
from service.server import build_transport, drain, open_tracing, operations_of
from service.shadow.samples import PlanSampleSender
from service.telemetry.metrics import Metrics
from service.workers.forwarding import ForwardedOperations, ForwardedRegions, ForwardedSettings, settings_of
from service.workers.placement import threads_of
from service.workers.state import Report, ServerState, SlotState, WorkerRegistry
from service.workers.weights import SharedWeights

if TYPE_CHECKING:
    from service.grpc.transport import Transport
    from service.telemetry.tracing import Tracing

_log = logging.getLogger(__name__)
_LAST_WORDS_SECONDS = 5.0  # for the supervisor to receive the last answer
_LAST_TRACES_SECONDS = 1.0
_POLL_SECONDS = 0.1
_EXIT_WRONG = 2


@dataclass(frozen=True, slots=True)
class _Served:
    """What a worker serves, once the supervisor has sent its configuration."""

    listen_when_loaded: bool  # because other workers serve meanwhile
    metrics: Metrics
    repository: Repository
    regions: ForwardedRegions | None
    settings: Mapping[str, Settings]  # the worker's own, by what the supervisor calls them
    tracing: Tracing | None
    transport: Transport


class Worker:
    """Receives the supervisor's messages on one thread, and acts on them on the main one: :meth:`run`."""

    def __init__(self, end: socket.socket) -> None:
        self._starts: queue.SimpleQueue[_Served] = queue.SimpleQueue()
        self._drains: queue.SimpleQueue[tuple[float, Future[Body]]] = queue.SimpleQueue()
        self._server = ServerState()
        self._served: _Served | None = None
        self._listening = False
        self._settled = threading.Event()  # nothing is being loaded
        self._reporting = threading.Lock()
        handlers: dict[str, Callable[[_Served, Message], Answer]] = {
            "apply": lambda served, message: served.repository.apply(
                DesiredModel.from_json(read_text(message.files[0]))
            ),
            "precision": lambda served, message: served.repository.order(from_json(PrecisionOrder, message.body)),
            "transition": lambda served, message: served.repository.transition(**message.body),
            "retire": lambda served, message: served.repository.retire(),
            "settings": _set,
            "counts": lambda served, message: _counts(served),
            "adopt": _adopt,
            "forget": _forget,
        }
        self._peer = Peer(
            Channel(end),
            "the supervisor",
            {
                "start": self._start,
                "ping": lambda message: None,
                "state": lambda message: self._server.receive(message.body),
                "weights": lambda message: self._weights.receive(message),
                "drain": self._drain,
                **{kind: self._when_started(handler) for kind, handler in handlers.items()},
            },
            lambda: os._exit(1),  # without a supervisor this must not keep the port: the next server needs it
        )
        self._weights = SharedWeights(self._peer.tell)

    def run(self) -> None:
        """Serve until told to drain. Never returns: threads may still be inside native code."""
        self._peer.start()
        self._weights.start()
        served = self._starts.get()
        with _ending_on_error():
            self._serve(served)

    def _serve(self, served: _Served) -> None:
        repository = served.repository
        repository.subscribe(self._report)
        repository.start()
        self._report()
        while served.listen_when_loaded and not self._settled.wait(_POLL_SECONDS) and self._drains.empty():
            pass  # a connection to this worker would only learn that models are loading
        served.transport.start()
        self._listening = True
        self._report()
        heap = HeapTrimmer()
        heap.start()
        seconds, done = self._drains.get()
        heap.stop()
        ending = drain(repository, served.transport, served.tracing, _LAST_TRACES_SECONDS, seconds)
        self._peer.tell("counts", _counts(served))  # the last, because nobody can ask any more
        done.set_result({"answered": ending.completed})
        logging.shutdown()
        # The supervisor closes the channel when it has the answer, which ends this process.
        time.sleep(_LAST_WORDS_SECONDS)
        os._exit(0)

    def _report(self) -> None:
        """Report this worker's state to the supervisor. For any thread; the last report has the newest state."""
        if self._served is None:
            return
        repository = self._served.repository
        with self._reporting:
            slots = tuple(map(SlotState.of, repository.models()))
            if any(slot.state == "loading" for slot in slots):
                self._settled.clear()
            else:
                self._settled.set()
            self._peer.tell("report", to_json(Report(self._listening, repository.ready, slots)))

    # --- on the peer's thread -----------------------------------------------------------------------------------------

    def _start(self, message: Message) -> None:
        with _ending_on_error():  # the main thread would wait for its start for ever
            self._served = served = self._prepare(message)
            self._starts.put(served)

    def _prepare(self, message: Message) -> _Served:
        body, config, metrics, ask = message.body, ServerConfig(**message.body["config"]), Metrics(), self._peer.ask
        configure(config.log_level, config.log_format, worker=body["number"])
        repository = Repository(
            metrics,
            device=config.device,
            threads=threads_of(config.threads, config.workers),
            weights=self._weights,
            ready_when_empty=config.model_control == "explicit",
            new_sender=lambda name, plan: PlanSampleSender(name, plan, ask),
            on_verdict=lambda verdict: self._peer.tell("verdict", to_json(verdict)),
            rank=ProcessRank(body["number"] - 1, config.workers),
        )
        repository.apply_all(map(DesiredModel.from_json, json.loads(read_text(message.files[0]))))
        registry = WorkerRegistry(repository, self._server)
        traces, tracing = open_tracing(config, repository, metrics.traced)
        own: dict[str, Settings] = {"logs": LogSettings(config.log_level, config.log_format), "traces": traces}
        logs, traces_of_all = (ForwardedSettings(own[what], what, ask) for what in ("logs", "traces"))
        regions = ForwardedRegions(new_table(config), ask) if config.shared_memory else None
        forwarded = ForwardedOperations(registry, ask)
        operations = operations_of(config, forwarded, forwarded, regions, logs, traces_of_all)
        transport = build_transport(config, registry, metrics.refused, Credentials.of(config), operations, tracing)
        return _Served(body["listen_when_loaded"], metrics, repository, regions, own, tracing, transport)

    def _when_started(self, handler: Callable[[_Served, Message], Answer]) -> Callable[[Message], Answer]:
        def handle(message: Message) -> Answer:
            if self._served is None:  # it will be sent what is desired
                raise Unavailable("this worker is being started; try again", ENDED)
            return handler(self._served, message)

        return handle

    def _drain(self, message: Message) -> Future[Body]:
        done: Future[Body] = Future()
        self._drains.put((message.body["seconds"], done))
        return done


def _set(served: _Served, message: Message) -> Body:
    body = message.body
    now = served.settings[body["what"]].update(settings_of({"settings": body["changes"]}), body["model"])
    return {"settings": {name: list(values) for name, values in now.items()}}


def _counts(served: _Served) -> Body:
    statistics = tuple(RegistryModels(served.repository).statistics("", ""))
    return {
        "metrics": [family.as_json() for family in served.metrics.snapshot()],
        "statistics": to_json(statistics, tuple[VersionStatistics, ...]),
    }


def _adopt(served: _Served, message: Message) -> None:
    """Add a region that the supervisor has registered, with the file in its message."""
    if served.regions is not None:
        served.regions.table.adopt(Region(**message.body), message.files[0])


def _forget(served: _Served, message: Message) -> None:
    """Remove a region, or all of them, that the supervisor has unregistered."""
    if served.regions is not None:
        served.regions.table.unregister(message.body["name"])


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
    bound_heap()
    Worker(socket_to_parent()).run()


if __name__ == "__main__":
    main()
