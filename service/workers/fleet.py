"""The workers of one server: keeps them running, sends them messages, and folds their reports into one state."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from bf16kit.messages.errors import RuntimeFailure, Unavailable
from bf16kit.service.config.loops import Ending, Guard
from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.leader import new_table, open_regions
from bf16kit.service.models.plan import DesiredModel, Plan
from bf16kit.service.peers.channel import Body, text_file
from bf16kit.service.peers.child import Child
from bf16kit.service.peers.peer import ENDED, Answer, Message, Peer
from bf16kit.service.workers.forwarding import FleetRegions
from bf16kit.service.workers.state import Report, ServerState, SlotState
from bf16kit.service.workers.weights import WeightBroker

_log = logging.getLogger(__name__)
WORKER = "bf16kit.service.workers.worker"
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_GPU_DEVICE = re.compile(r"nvidia\d+")
_LATE_SECONDS = 3.0  # for a worker to report the result of its drain, after its time is up
Handlers = Mapping[str, Callable[[str, Message], Answer]]  # each gets the worker's name and its message


class Fleet:
    """Runs the workers. One thread calls :meth:`maintain` at intervals to keep them alive; the rest is for any thread.

    ``handlers`` answer workers' messages other than reports. ``on_death`` is called with the name of a worker that
    died. ``state`` has the newest state of the whole server.
    """

    def __init__(self, config: ServerConfig, port: int, handlers: Handlers, on_death: Callable[[str], None]) -> None:
        self.state = ServerState()
        self.regions = FleetRegions(open_regions(config) or new_table(config), self.ask)
        self._config = config
        self._port = port
        self._weights = WeightBroker(self._tell_one)
        self._desired: dict[str, DesiredModel] = {}
        self._trying: dict[str, DesiredModel] = {}
        self._remembered: dict[tuple[str, str], Mapping[str, Any]] = {}  # by kind and name
        self._on_death = on_death
        self._lock = threading.Lock()
        self._guard = Guard()
        self._retired = False
        self._told = self.state.to_json()  # what the workers know of it
        self._reports: list[Report | None] = [None] * config.workers
        available = gpus(os.environ) if config.device in ("auto", "cuda") else []
        handlers = {**handlers, **self._weights.handlers}
        self.workers = [self._worker(index, available, handlers) for index in range(config.workers)]

    # --- what they serve ----------------------------------------------------------------------------------------------

    @property
    def desired_models(self) -> Mapping[str, DesiredModel]:
        """What every worker is to serve, by model. A restarted worker gets them."""
        return dict(self._desired)

    def change(self, desired_models: Mapping[str, DesiredModel]) -> None:
        """Set all desired models. Sends nothing to running workers."""
        with self._lock:
            self._desired, self._trying = dict(desired_models), {}
            self._fold()

    def change_model(self, desired: DesiredModel, trying: DesiredModel | None = None) -> None:
        """Set one desired model, and what is tried in its place. Sends nothing to running workers."""
        with self._lock:
            for known, new in ((self._desired, desired), (self._trying, trying or DesiredModel(desired.name))):
                if new.plans:
                    known[new.name] = new
                else:
                    known.pop(new.name, None)
            self._fold()

    def plan(self, model: str, version: int, digest: str) -> Plan | None:
        """Return the plan of this digest, if this version is to be served by it, or is being tried with it."""
        with self._lock:
            desired_models = [known[model] for known in (self._desired, self._trying) if model in known]
        plans = (plan for each in desired_models for plan in each.plans)
        return next((plan for plan in plans if plan.version == version and plan.digest == digest), None)

    def remember(self, kind: str, name: str, body: Mapping[str, Any]) -> None:
        """Send this message to every worker that starts from now on."""
        with self._lock:
            self._remembered[kind, name] = body

    def forget(self, kind: str, name: str) -> None:
        """Stop sending the remembered message of this kind and name."""
        with self._lock:
            self._remembered.pop((kind, name), None)

    def slots_of(self, worker: str, model: str) -> dict[int, SlotState]:
        """Return a model's slots in the worker of this name, by version, as it reported them last."""
        reports = (report for report, each in zip(self._reports, self.workers, strict=True) if each.name == worker)
        return {slot.version: slot for report in reports if report for slot in report.slots if slot.name == model}

    # --- messages -----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[str]:
        """The names of the running workers. Those that already serve come first."""
        order = sorted((report is None or not report.listening, index) for index, report in enumerate(self._reports))
        return [self.workers[index].name for _, index in order if self.workers[index].peer is not None]

    def ask(
        self, kind: str, body: Mapping[str, Any] | None = None, files: Sequence[int] = ()
    ) -> dict[str, Future[Body]]:
        """Ask every running worker, by name. Those that already serve come first."""
        return {name: self.ask_one(name, kind, body, files) for name in self.running}

    def ask_one(
        self, name: str, kind: str, body: Mapping[str, Any] | None = None, files: Sequence[int] = ()
    ) -> Future[Body]:
        """Ask the worker of this name. The future fails with Unavailable if it does not run."""
        if (peer := self._peer(name)) is not None:
            return peer.ask(kind, body, files)
        return _failed(Unavailable(f"{name} of this server is being started; try again", ENDED))

    def ask_to_serve(self, name: str, desired: DesiredModel) -> Future[Body]:
        """Ask the worker of this name to serve a model as desired. The future fails as that of :meth:`ask_one` does."""
        try:
            with text_file(desired.to_json()) as file:
                return self.ask_one(name, "apply", {}, [file])
        except OSError as error:
            return _failed(RuntimeFailure(f"{name} cannot be asked: {error.strerror}"))

    # --- life ---------------------------------------------------------------------------------------------------------

    def maintain(self) -> None:
        """Keep the workers running. An error with one is logged, and the others are kept running."""
        for worker in self.workers:
            self._guard.run(f"{worker.name}'s maintenance", worker.maintain)

    def retire(self) -> None:
        """Report not ready, so that load balancers stop sending requests. Requests that still come are answered."""
        with self._lock:
            self._retired = True
            self._fold()
        for peer in self._peers():
            peer.ask("retire")  # one that is being started rejects it

    def drain(self, seconds: float) -> Ending:
        """Have all workers finish requests in flight and reject new ones, within ``seconds``; then end them."""
        self.retire()
        until = time.monotonic() + seconds + _LATE_SECONDS
        for worker in self.workers:
            worker.retire()
        pending = [peer.ask("drain", {"seconds": seconds}) for peer in self._peers()]
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

    # --- inside -------------------------------------------------------------------------------------------------------

    def _peer(self, name: str) -> Peer | None:
        return next((worker.peer for worker in self.workers if worker.name == name), None)

    def _peers(self) -> list[Peer]:
        return [peer for worker in self.workers if (peer := worker.peer) is not None]

    def _tell_one(self, name: str, kind: str, body: Mapping[str, Any], files: Sequence[int]) -> None:
        if (peer := self._peer(name)) is not None:
            peer.tell(kind, body, files)

    def _worker(self, index: int, available: list[str], handlers: Handlers) -> Child:
        gpu, name = gpu_for(index, self._config.device, available), f"worker {index + 1}"
        return Child(
            name,
            WORKER,
            {
                "report": lambda message: self._report(index, Report.from_json(message.body)),
                **{kind: partial(handler, name) for kind, handler in handlers.items()},
            },
            lambda peer: self._on_worker_start(index, peer),
            lambda: self._on_worker_death(index, name),
            environment=None if gpu is None else {**os.environ, _VISIBLE_GPUS: gpu},
        )

    def _on_worker_start(self, index: int, peer: Peer) -> None:
        """Send a starting worker its configuration and everything else that all have. It has no state of its own."""
        config = self._config.model_copy(update={"grpc_port": self._port}).model_dump(mode="json")
        with self._lock, self.regions.lock:
            others = any(report is not None and report.listening for report in self._reports)
            with text_file(json.dumps([each.to_json() for each in self._desired.values()])) as desired:
                peer.tell("start", {"config": config, "number": index + 1, "listen_when_loaded": others}, [desired])
            self.regions.tell_all(peer)
            for (kind, _), body in self._remembered.items():
                peer.ask(kind, body)  # the answer does not matter: a model may not be loaded yet
            peer.tell("state", self._told)

    def _on_worker_death(self, index: int, name: str) -> None:
        self._weights.worker_died(name)
        self._report(index, None)
        self._on_death(name)

    def _report(self, index: int, report: Report | None) -> None:
        with self._lock:
            self._reports[index] = report
            self._fold()

    def _fold(self) -> None:
        """Fold the reports into the state, and tell all workers if something has become ready, or ceased to be.

        The caller holds the lock, which keeps the states in order.
        """
        desired_models = [*self._desired.values(), *self._trying.values()]
        self.state.fold(
            self._reports,
            [(each.name, plan.version) for each in desired_models for plan in each.plans],
            retired=self._retired,
        )
        before, self._told = self._told, self.state.to_json()
        if self.state.ready != before["ready"]:
            _log.info("ready" if self.state.ready else "not ready")
        if self._told != before:
            for peer in self._peers():
                peer.tell("state", self._told)


def _failed(error: Exception) -> Future[Body]:
    failed: Future[Body] = Future()
    failed.set_exception(error)
    return failed


def gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that this process may use, as CUDA names them.

    A container has only its own GPUs' device files.
    """
    chosen = environment.get(_VISIBLE_GPUS)
    if chosen is not None:
        return [each.strip() for each in chosen.split(",") if each.strip() not in ("", "-1")]
    count = sum(_GPU_DEVICE.fullmatch(path.name) is not None for path in devices.iterdir())
    return [str(index) for index in range(count)]


def gpu_for(worker: int, device: str, available: list[str]) -> str | None:
    """Return the one GPU that ``worker`` (from 0) shall see, so that all are used; None if it sees all of the server's.

    A worker that sees one GPU addresses it as cuda:0. ``cuda:N`` selects the same GPU for all workers. The CPU needs
    none.
    """
    if device not in ("auto", "cuda") or len(available) < 2:
        return None
    return available[worker % len(available)]
