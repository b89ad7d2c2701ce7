"""The workers of one server: keeps them running, sends them messages, and combines their reports."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from typing import Any

from bf16kit.messages.errors import RuntimeFailure, Unavailable
from service.config.guard import Guard
from service.config.serverconfig import ServerConfig
from service.config.stop import Ending
from service.leader import open_regions
from service.models.plan import DesiredModel, Plan
from service.peers.channel import Body
from service.peers.child import SILENT_SECONDS, Child
from service.peers.peer import ENDED, Answer, Handler, Message, Peer
from service.peers.textfile import text_file
from service.workers.placement import VISIBLE, gpu_for, gpus
from service.workers.regions import FleetRegions
from service.workers.view import Key, Report, View
from service.workers.weightowner import WeightOwner

_log = logging.getLogger(__name__)
WORKER = "service.workers.worker"
_LATE_SECONDS = 3.0  # for a worker to report the result of its drain, after its time is up


class Fleet:
    """Runs the workers. One thread calls :meth:`maintain` at intervals to keep them alive; the rest is for any thread.

    ``handlers`` answer workers' messages other than reports, given the worker's name. ``on_death`` is called with the
    name of a worker that died.
    """

    def __init__(
        self,
        config: ServerConfig,
        port: int,
        *,
        handlers: Mapping[str, Callable[[str, Message], Answer]] | None = None,
        on_death: Callable[[str], None] = lambda worker: None,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._config = config
        self._port = port
        self._weights = WeightOwner()
        self._weights.start()
        table = open_regions(config)
        self._regions = None if table is None else FleetRegions(table, self._peers)
        self._desired_models: dict[str, DesiredModel] = {}
        self._trying: dict[str, DesiredModel] = {}  # by model
        self._state: dict[tuple[str, str], Mapping[str, Any]] = {}  # remembered messages, by kind and name
        self._handlers = dict(handlers or {})
        self._on_death = on_death
        self._lock = threading.Lock()
        self._guard = Guard()
        self._retired = False
        self._reports: list[Report | None] = [None] * config.workers
        self._callbacks: list[Callable[[], None]] = []
        self.view = View()
        self._refresh_view()
        available = gpus(os.environ) if config.device in ("auto", "cuda") else []
        self.workers = [self._worker(index, available, silent_seconds) for index in range(config.workers)]

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called, on any thread, after every change of the view. It must not block."""
        self._callbacks.append(callback)

    @property
    def desired_models(self) -> Mapping[str, DesiredModel]:
        """What every worker is to serve, by model. A restarted worker gets them."""
        return dict(self._desired_models)

    def change(self, desired_models: Mapping[str, DesiredModel]) -> None:
        """Set all desired models. Sends nothing to running workers."""
        with self._lock:
            self._desired_models, self._trying = dict(desired_models), {}
            changed = self._refresh_view()
        if changed:
            self._changed()

    def change_model(self, desired: DesiredModel, trying: DesiredModel | None = None) -> None:
        """Set one desired model, and what is tried in its place. Sends nothing to running workers."""
        with self._lock:
            for known, new in ((self._desired_models, desired), (self._trying, trying or DesiredModel(desired.name))):
                if new.plans:
                    known[new.name] = new
                else:
                    known.pop(new.name, None)
            changed = self._refresh_view()
        if changed:
            self._changed()

    def remember(self, kind: str, name: str, body: Mapping[str, Any]) -> None:
        """Send this message to every worker that starts from now on as well."""
        with self._lock:
            self._state[kind, name] = body

    def forget(self, kind: str, name: str) -> None:
        """Stop sending the remembered message of this kind and name."""
        with self._lock:
            self._state.pop((kind, name), None)

    def plan(self, model: str, version: int, digest: str) -> Plan | None:
        """Return the plan of this digest, if this version is to be served by it, or is being tried with it."""
        with self._lock:
            desired_models = [known[model] for known in (self._desired_models, self._trying) if model in known]
        plans = (plan for each in desired_models for plan in each.plans)
        return next((plan for plan in plans if plan.version == version and plan.digest == digest), None)

    def ask(self, kind: str, body: Mapping[str, Any] | None = None) -> dict[str, Future[Body]]:
        """Ask every running worker, by name. Those that already serve come first."""
        return {name: self.ask_one(name, kind, body) for name in self.running}

    def ask_to_serve(self, name: str, desired: DesiredModel) -> Future[Body]:
        """Ask the worker of this name to serve a model as desired. The future fails as that of :meth:`ask_one` does."""
        try:
            with text_file(desired.to_json()) as file:
                return self.ask_one(name, "want", {}, [file])
        except OSError as error:
            failed: Future[Body] = Future()
            failed.set_exception(RuntimeFailure(f"{name} cannot be asked: {error.strerror}"))
            return failed

    def ask_one(
        self, name: str, kind: str, body: Mapping[str, Any] | None = None, files: Sequence[int] = ()
    ) -> Future[Body]:
        """Ask the worker of this name. The future fails with Unavailable if it does not run."""
        peer = next((worker.peer for worker in self.workers if worker.name == name), None)
        if peer is None:
            failed: Future[Body] = Future()
            failed.set_exception(Unavailable(f"{name} of this server is being started; try again", ENDED))
            return failed
        return peer.ask(kind, body, files)

    @property
    def running(self) -> list[str]:
        """The names of the running workers. Those that already serve come first."""
        order = sorted((report is None or not report.listening, index) for index, report in enumerate(self._reports))
        return [self.workers[index].name for _, index in order if self.workers[index].peer is not None]

    def maintain(self) -> None:
        """Keep the workers running. An error with one is logged, and the others are kept running."""
        for worker in self.workers:
            self._guard.run(f"{worker.name}'s maintenance", worker.maintain)

    def tell(self, kind: str, body: Mapping[str, Any] | None = None) -> None:
        """Send a message to every running worker."""
        for peer in self._peers():
            peer.tell(kind, body)

    def retire(self) -> None:
        """Report not ready, so that load balancers stop sending requests. Requests that still come are answered."""
        with self._lock:
            self._retired = True
            self._refresh_view()
        self.tell("retire")
        self._changed()

    def drain(self, seconds: float) -> Ending:
        """Have all workers finish requests in flight and reject new ones, within ``seconds``; then end them."""
        self.retire()
        until = time.monotonic() + seconds + _LATE_SECONDS
        for worker in self.workers:
            worker.retire()
        pending = [
            peer.ask("drain", {"seconds": seconds}) for worker in self.workers if (peer := worker.peer) is not None
        ]
        wait(pending, max(0.0, until - time.monotonic()))
        endings = [each.result() for each in pending if each.done() and each.exception() is None]
        for worker in self.workers:
            if (peer := worker.peer) is not None:
                peer.close()  # it has sent its last message, and ends
            worker.wait(_LATE_SECONDS)
        answered = len(endings) == len(pending) and all(ending["answered"] for ending in endings)
        return Ending(answered, answered)

    def close(self) -> None:
        """End every worker at once."""
        for worker in self.workers:
            worker.retire()
            worker.kill()
            worker.wait(_LATE_SECONDS)
        self._weights.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _peers(self) -> list[Peer]:
        return [peer for worker in self.workers if (peer := worker.peer) is not None]

    def _worker(self, index: int, available: list[str], silent_seconds: float) -> Child:
        gpu, name = gpu_for(index, self._config.device, available), f"worker {index + 1}"

        def handler(answer: Callable[[str, Message], Answer]) -> Handler:
            return lambda message: answer(name, message)

        handlers = {kind: handler(answer) for kind, answer in self._handlers.items()}
        return Child(
            name,
            WORKER,
            {
                "report": lambda message: self._on_report(index, message),
                **handlers,
                **({} if self._regions is None else self._regions.handlers),
            },
            lambda peer: self._on_worker_start(index, peer),
            lambda: self._on_worker_death(index, name),
            environment=None if gpu is None else {**os.environ, VISIBLE: gpu},
            silent_seconds=silent_seconds,
        )

    def _on_worker_start(self, index: int, peer: Peer) -> None:
        """Send a starting worker its configuration and all remembered state. It has no state of its own."""
        config = self._config.model_copy(update={"grpc_port": self._port}).model_dump(mode="json")
        regions = self._regions
        with self._lock, nullcontext() if regions is None else regions.lock:
            others = any(report is not None and report.listening for report in self._reports)
            desired = json.dumps([each.to_json() for each in self._desired_models.values()])
            with self._weights.connect() as weights, text_file(desired) as file:
                start = {"config": config, "number": index + 1, "patient": others}
                peer.tell("start", start, [weights.fileno(), file])
            if regions is not None:
                regions.tell_all(peer)
            for (kind, _), body in self._state.items():
                peer.tell(kind, body)
            peer.tell("view", self.view.as_json())

    def _on_worker_death(self, index: int, name: str) -> None:
        self._report(index, None)
        self._on_death(name)

    def _on_report(self, index: int, message: Message) -> None:
        self._report(index, Report.from_json(message.body))

    def _report(self, index: int, report: Report | None) -> None:
        with self._lock:
            self._reports[index] = report
            changed = self._refresh_view()
        if changed:
            self._changed()

    def _wanted(self) -> list[Key]:
        desired_models = [*self._desired_models.values(), *self._trying.values()]
        return [(desired.name, plan.version) for desired in desired_models for plan in desired.plans]

    def _refresh_view(self) -> bool:
        """Rebuild the view and send it to all workers. Return whether it changed.

        The caller holds the lock, which keeps the views in order.
        """
        before = self.view
        self.view = View.of(self._reports, self._wanted(), retired=self._retired, was_complete=before.complete)
        if self.view == before:
            return False
        if self.view.ready != before.ready:
            _log.info("ready" if self.view.ready else "not ready")
        self.tell("view", self.view.as_json())
        return True

    def _changed(self) -> None:
        for callback in self._callbacks:
            callback()
