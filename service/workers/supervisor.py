"""The supervisor: owns the wanted state, the HTTP port and the workers. It runs no model and no gRPC."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from bf16kit.messages.errors import Unavailable
from service.config.credentials import Credentials
from service.config.guard import Guard
from service.config.logsettings import LogSettings
from service.config.periodic import PeriodicThread
from service.config.ports import ReservedPort
from service.config.serverconfig import ServerConfig
from service.config.stop import Ending, OnStarted, Stop
from service.drift.owner import FallbackOwner
from service.drift.verdict import DriftVerdict
from service.http.evidence import evidence_route
from service.http.pages import routes
from service.http.views import StatusReader
from service.leader import announce, open_http
from service.models.controller import Controller
from service.models.poll import RepositoryPoller
from service.models.retries import Retries
from service.operations import IndexEntry
from service.peers.channel import Body
from service.peers.peer import Answer, Message
from service.shadow.process import NAME as SHADOW
from service.shadow.process import ShadowProcess
from service.telemetry.history import NAMES, TICK_SECONDS, History
from service.telemetry.metrics import Metrics
from service.workers.changes import FleetSettings, ModelChanges
from service.workers.counts import Counting
from service.workers.fleet import Fleet
from service.workers.overview import Overview
from service.workers.processes import WorkerProcesses
from service.workers.proxies import settings_from_json
from service.workers.statistics import as_json
from service.workers.view import UNLOADING

_log = logging.getLogger(__name__)
_MAINTAIN_SECONDS = 0.1
_ANSWERING = 8  # threads for workers' requests; loading a model occupies none of them


def supervise(config: ServerConfig, stop: Stop, on_started: OnStarted = lambda grpc_port, http_port: None) -> Ending:
    """Serve with ``config.workers`` processes until ``stop`` is set, then drain them all.

    Raises ConfigError if a port is in use. The calling thread must live as long as the workers.
    """
    with ReservedPort(config.host, config.grpc_port) as port:
        supervisor = Supervisor(config, port.port)
        fleet, overview = supervisor.fleet, Overview(supervisor.fleet, supervisor.counting.statistics_of)
        history = History(lambda: supervisor.counting.samples(NAMES))
        status = StatusReader(overview, history, workers=config.workers, off_reason=supervisor.shadow.off_reason)
        evidence = evidence_route(overview, supervisor.shadow.evidence if config.evidence else None)
        pages = routes(overview, supervisor.counting, status.snapshot, evidence)
        http = open_http(config, pages, supervisor.metrics, Credentials.of(config))
        status.listening(port.port, http.port)
        ticking = PeriodicThread("history", TICK_SECONDS, history.tick)
        try:
            supervisor.start()
            http.start()
            announce(config, port.port, http.port)
            on_started(port.port, http.port)
            ticking.start()
            while not stop.wait(_MAINTAIN_SECONDS):
                supervisor.maintain()
            supervisor.stop()
            return _drain(config, fleet)
        finally:
            supervisor.stop()
            supervisor.shadow.close()
            fleet.close()
            ticking.stop()
            http.close()


class Supervisor:
    """Answers the workers' requests on behalf of all of them."""

    def __init__(self, config: ServerConfig, port: int) -> None:
        self.metrics = Metrics()  # of this process
        handlers: dict[str, Callable[[str, Message], Answer]] = {
            "counts": lambda worker, message: self.counting.receive(worker, message.body),
            "statistics": self._later(lambda body: {"statistics": as_json(self.counting.statistics())}),
            "index": self._later(lambda body: {"lines": self._index()}),
            "load": self._later(lambda body: self.controller.load(body["name"], body["config"])),
            "unload": self._later(lambda body: self.controller.unload(body["name"])),
            "settings": self._later(self._settings),
            "samples": lambda worker, message: self.shadow.forward(message),
            "verdict": lambda worker, message: self._owner.receive(DriftVerdict.from_json(message.body)),
        }
        self.fleet = Fleet(config, port, handlers=handlers, on_death=self._on_worker_death)
        self.counting = Counting(self.metrics, self._counts, lambda: self.fleet.view.slots)
        self.shadow = ShadowProcess(
            config,
            lambda message: self.counting.receive(SHADOW, message.body),
            lambda: self.counting.process_died(SHADOW),
            lambda verdict: self._owner.receive(verdict),
            on_forget=lambda model, versions: self.counting.forget(model, versions),
            shared=True,
            find_plan=self.fleet.plan,
        )
        self._workers = WorkerProcesses(self.fleet)
        self._owner = FallbackOwner(self._workers, self.shadow.restart)
        self._models = ModelChanges(self.fleet, self._changed)
        self._settings_of_all = FleetSettings(self.fleet)
        self._logs = LogSettings(config.log_level, config.log_format)
        self.controller = Controller(
            config.repository,
            self._models.apply,
            self._models.apply_all,
            config.model_control,
            config.load_model,
            Retries(lambda: self.fleet.view.slots.values()),
            lambda: self.fleet.view.slots.values(),
        )
        self.controller.apply_initial()
        self._poll = RepositoryPoller(self.controller, config.poll_seconds) if config.model_control == "poll" else None
        self._answering = ThreadPoolExecutor(_ANSWERING, "answering")
        self._guard = Guard()

    def start(self) -> None:
        if self._poll is not None:
            self._poll.start()

    def stop(self) -> None:
        """Start no further changes."""
        if self._poll is not None:
            self._poll.stop()
        self._models.close()
        self._answering.shutdown(wait=False)

    def maintain(self) -> None:
        """Keep all processes running. An error in it is logged: it must not end the server."""
        self.fleet.maintain()
        self._guard.run("the shadow's maintenance", self.shadow.maintain)
        self._guard.run("the fallback's maintenance", self._owner.maintain)

    def _counts(self) -> dict[str, Future[Body]]:
        pending = self.fleet.ask("counts")
        if (counts := self.shadow.ask_counts()) is not None:
            pending[SHADOW] = counts
        return pending

    def _on_worker_death(self, worker: str) -> None:
        self.metrics.worker_restarted()
        self.counting.process_died(worker)

    def _changed(self, model: str, versions: Collection[int]) -> None:
        self.counting.forget(model, versions)
        self.shadow.forget(model)
        self._workers.changed(model, versions)

    def _index(self) -> list[list[str]]:
        served = [
            IndexEntry(
                slot.name,
                str(slot.version),
                "UNLOADING" if slot.reason == UNLOADING else slot.state.upper(),
                slot.reason,
            )
            for slot in self.fleet.view.slots.values()
        ]
        return [[line.name, line.version, line.state, line.reason] for line in self.controller.index(served)]

    def _settings(self, body: Body) -> Body:
        now = self._settings_of_all.update(body["what"], body["changes"], body["model"])
        if body["what"] == "logs":
            self._logs.update(settings_from_json(now))
        return {"settings": now}

    def _later(self, work: Callable[[Body], Any]) -> Callable[[str, Message], Answer]:
        """Return a handler that runs ``work`` on a thread.

        If ``work`` returns a future, the thread is free until it ends.
        """

        def answer(worker: str, message: Message) -> Future[Body]:
            result: Future[Body] = Future()

            def run() -> None:
                try:
                    found = work(message.body)
                except BaseException as error:  # noqa: BLE001 -- the worker that asked gets it
                    result.set_exception(error)
                    return
                if isinstance(found, Future):
                    found.add_done_callback(lambda done: _pass_on(done, result))
                else:
                    result.set_result(found)

            try:
                self._answering.submit(run)
            except RuntimeError:
                result.set_exception(Unavailable("the server is shutting down; try another", "draining"))
            return result

        return answer


def _pass_on(done: Future[Any], result: Future[Body]) -> None:
    error = CancelledError() if done.cancelled() else done.exception()
    if error is None:
        result.set_result({})
    else:
        result.set_exception(error)


def _drain(config: ServerConfig, fleet: Fleet) -> Ending:
    """Stop the server: report not ready, reject new requests, finish those in flight.

    The HTTP port answers throughout.
    """
    if config.lame_duck_seconds:
        _log.info("stopping: not ready, but still serving for another %g s", config.lame_duck_seconds)
        fleet.retire()
        until = time.monotonic() + config.lame_duck_seconds
        while time.monotonic() < until:  # a second signal ends the process at once, and the workers with it
            time.sleep(min(_MAINTAIN_SECONDS, max(0.0, until - time.monotonic())))
            fleet.maintain()
    started_at = time.monotonic()
    _log.info("draining for up to %g s", config.drain_seconds)
    ending = fleet.drain(config.drain_seconds)
    if not ending.completed:
        _log.warning("requests were cut off: still in flight after %g s", config.drain_seconds)
    _log.info("stopped after %.2f s", time.monotonic() - started_at)
    return ending
