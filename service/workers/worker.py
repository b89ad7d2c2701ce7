"""A worker: the gRPC port and the models, led by a supervisor. Started with ``python -m``."""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from bf16kit.messages.errors import Bf16kitError, Unavailable
from bf16kit.runtime import available_cpus
from bf16kit.service.config.certificates import Credentials
from bf16kit.service.config.logs import configure
from bf16kit.service.config.resources import HeapTrimmer, bound_heap
from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.drift.fallbackcontroller import PrecisionOrder
from bf16kit.service.drift.gate import ProcessRank
from bf16kit.service.leader import new_table
from bf16kit.service.models.plan import DesiredModel
from bf16kit.service.models.repository import Repository
from bf16kit.service.operations import Region, Setting, Settings
from bf16kit.service.peers.channel import Body, Channel, from_json, read_text, to_json
from bf16kit.service.peers.child import socket_to_parent
from bf16kit.service.peers.peer import ENDED, Answer, Handler, Message, Peer
from bf16kit.service.server import build_transport, drain, open_tracing, operations_of
from bf16kit.service.shadow.samples import PlanSampleSender
from bf16kit.service.telemetry.metrics import Metrics
from bf16kit.service.telemetry.settings import LogSettings
from bf16kit.service.telemetry.values import to_message
from bf16kit.service.workers.forwarding import ForwardedOperations, ForwardedRegions, ForwardedSettings
from bf16kit.service.workers.state import Report, SlotState, WorkerRegistry
from bf16kit.service.workers.weights import SharedWeights

_log = logging.getLogger("bf16kit.service.workers.worker")  # __name__ is "__main__": it is run with -m
_LAST_WORDS_SECONDS = 5.0  # for the supervisor to receive the last answer
_LAST_TRACES_SECONDS = 1.0
_POLL_SECONDS = 0.1
_EXIT_WRONG = 2


class _Server:
    """The models and the gRPC port of a worker, as the supervisor's first message configures them.

    ``handlers`` act on its other messages, by kind.
    """

    def __init__(self, start: Message, peer: Peer, weights: SharedWeights) -> None:
        body, config, ask = start.body, ServerConfig(**start.body["config"]), peer.ask
        configure(config.log_level, config.log_format, worker=body["number"])
        self._tell = peer.tell
        self._listen_when_loaded = body["listen_when_loaded"]  # because other workers serve meanwhile
        self._listening = False
        self._reporting = threading.Lock()
        self._metrics = metrics = Metrics()
        self._repository = repository = Repository(
            metrics,
            device=config.device,
            threads=threads_of(config.threads, config.workers),
            weights=weights,
            ready_when_empty=config.model_control == "explicit",
            new_sender=lambda name, plan: PlanSampleSender(name, plan, ask),
            on_verdict=lambda verdict: peer.tell("verdict", to_json(verdict)),
            rank=ProcessRank(body["number"] - 1, config.workers),
        )
        repository.apply_all(map(DesiredModel.from_json, json.loads(read_text(start.files[0]))))
        registry, table = WorkerRegistry(repository), new_table(config)
        traces, self._tracing = open_tracing(config, repository, metrics.traced)
        self._settings: dict[str, Settings] = {
            "logs": LogSettings(config.log_level, config.log_format),
            "traces": traces,
        }
        logs, traces_of_all = (ForwardedSettings(own, what, ask) for what, own in self._settings.items())
        regions = ForwardedRegions(table, ask) if config.shared_memory else None
        forwarded = ForwardedOperations(registry, ask)
        operations = operations_of(config, forwarded, forwarded, regions, logs, traces_of_all)
        self._transport = build_transport(
            config, registry, metrics.refused, Credentials.of(config), operations, self._tracing
        )
        self.handlers: dict[str, Handler] = {
            "state": lambda message: registry.receive(message.body),
            "apply": lambda message: repository.apply(DesiredModel.from_json(read_text(message.files[0]))),
            "precision": lambda message: repository.order(from_json(PrecisionOrder, message.body)),
            "transition": lambda message: repository.transition(**message.body),
            "retire": lambda message: repository.retire(),
            "settings": lambda message: self._set(**message.body),
            "counts": lambda message: self._counts(),
            "adopt": lambda message: table.adopt(Region(**message.body), message.files[0]),
            "forget": lambda message: table.unregister(message.body["name"]),
        }

    def serve(self, drains: queue.SimpleQueue[tuple[float, Future[Body]]]) -> None:
        """Serve until told to drain: how long that may take, and the future that ends then."""
        self._repository.subscribe(self._report)
        self._repository.start()
        self._report()
        if self._listen_when_loaded:  # a connection to this worker would only learn that models are loading
            while any(slot.state == "loading" for slot in self._repository.models()) and drains.empty():
                time.sleep(_POLL_SECONDS)
        self._transport.start()
        self._listening = True
        self._report()
        heap = HeapTrimmer()
        heap.start()
        seconds, done = drains.get()
        heap.stop()
        ending = drain(self._repository, self._transport, self._tracing, _LAST_TRACES_SECONDS, seconds)
        self._tell("counts", self._counts())  # the last, because nobody can ask any more
        done.set_result({"answered": ending.completed})

    def _report(self) -> None:
        """Report this worker's state to the supervisor. For any thread; the last report has the newest state."""
        with self._reporting:
            slots = tuple(map(SlotState.of, self._repository.models()))
            self._tell("report", Report(self._listening, self._repository.ready, slots)._asdict())

    def _set(self, what: str, changes: Mapping[str, Sequence[Setting]], model: str) -> Body:
        return {"settings": dict(self._settings[what].update(changes, model))}

    def _counts(self) -> Body:
        return {"metrics": to_message(self._metrics.values())}


class Worker:
    """Receives the supervisor's messages on one thread, and serves on the main one: :meth:`run`."""

    def __init__(self, end: socket.socket) -> None:
        self._server: _Server | None = None
        self._starts: queue.SimpleQueue[_Server] = queue.SimpleQueue()
        self._drains: queue.SimpleQueue[tuple[float, Future[Body]]] = queue.SimpleQueue()
        kinds = ("state", "apply", "precision", "transition", "retire", "settings", "counts", "adopt", "forget")
        self._peer = Peer(
            Channel(end),
            "the supervisor",
            {
                "start": self._start,
                "ping": lambda message: None,
                "weights": lambda message: self._weights.receive(message),
                "drain": self._drain,
                **{kind: partial(self._when_started, kind) for kind in kinds},
            },
            lambda: os._exit(1),  # without a supervisor this must not keep the port: the next server needs it
        )
        self._weights = SharedWeights(self._peer.tell)

    def run(self) -> None:
        """Serve until told to drain. Never returns: threads may still be inside native code."""
        self._peer.start()
        self._weights.start()
        server = self._starts.get()
        with _ending_on_error():
            server.serve(self._drains)
        logging.shutdown()
        # The supervisor closes the channel when it has the answer, which ends this process.
        time.sleep(_LAST_WORDS_SECONDS)
        os._exit(0)

    def _start(self, message: Message) -> None:
        with _ending_on_error():  # the main thread would wait for its start for ever
            self._server = server = _Server(message, self._peer, self._weights)
            self._starts.put(server)

    def _when_started(self, kind: str, message: Message) -> Answer:
        if self._server is None:  # it will be sent what is desired
            raise Unavailable("this worker is being started; try again", ENDED)
        return self._server.handlers[kind](message)

    def _drain(self, message: Message) -> Future[Body]:
        done: Future[Body] = Future()
        self._drains.put((message.body["seconds"], done))
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


def threads_of(asked: int | None, workers: int, cpus: int | None = None) -> int:
    """Return the threads of one run in each of ``workers``: ``asked``, or an equal share of the processors."""
    return asked or max(1, (cpus or available_cpus()) // workers)


def main() -> None:
    """Entry point: ``python -m bf16kit.service.workers.worker DESCRIPTOR PARENT``."""
    bound_heap()
    Worker(socket_to_parent()).run()


if __name__ == "__main__":
    main()
