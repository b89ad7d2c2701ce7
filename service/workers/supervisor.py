"""The supervisor: leads the server, runs the workers and answers their requests. It runs no model and no gRPC."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from bf16kit.messages.errors import Unavailable
from bf16kit.service.config.loops import Ending, OnStarted, Stop
from bf16kit.service.config.ports import reserve
from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.drift.contract import DriftVerdict
from bf16kit.service.leader import MAINTAIN_SECONDS, Leader, announce
from bf16kit.service.operations import IndexEntry, Region, VersionStatistics
from bf16kit.service.peers.channel import Body, from_json, to_json
from bf16kit.service.peers.peer import Answer, Message, answers
from bf16kit.service.telemetry.metrics import Metrics
from bf16kit.service.telemetry.settings import LogSettings
from bf16kit.service.workers.changes import WorkerModels
from bf16kit.service.workers.fleet import Fleet
from bf16kit.service.workers.state import UNLOADING


def supervise(config: ServerConfig, stop: Stop, on_started: OnStarted = lambda grpc_port, http_port: None) -> Ending:
    """Serve with ``config.workers`` processes until ``stop`` is set, then drain them all.

    Raises ConfigError if a port is in use. The calling thread must live as long as the workers.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="changes", daemon=True).start()
    with reserve(config.host, config.grpc_port) as port:
        supervisor = Supervisor(config, port, loop)
        try:
            supervisor.leader.start(port)
            announce(config, port, supervisor.leader.http.port)
            on_started(port, supervisor.leader.http.port)
            while not stop.wait(MAINTAIN_SECONDS):
                supervisor.maintain()
            return supervisor.drain()
        finally:
            supervisor.close()


class Supervisor:
    """Answers the workers' requests on behalf of all of them. ``loop`` runs on another thread."""

    def __init__(self, config: ServerConfig, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._metrics = Metrics()  # of this process
        handlers: dict[str, Callable[[str, Message], Answer]] = {
            "counts": lambda worker, message: self.leader.counting.receive(worker, message.body),
            "samples": lambda worker, message: self.leader.shadow.forward(message),
            "verdict": lambda worker, message: self.leader.fallback.receive(from_json(DriftVerdict, message.body)),
            "statistics": self._later(lambda body: self._statistics()),
            "index": self._later(lambda body: {"lines": self._index()}),
            "load": self._later(lambda body: self._controller.load(body["name"], body["config"])),
            "unload": self._later(lambda body: self._controller.unload(body["name"])),
            "settings": self._later(lambda body: self._set(body["what"], body["changes"], body["model"])),
            "register": self._later(lambda body: self._fleet.regions.register(Region(**body))),
            "unregister": self._later(lambda body: self._fleet.regions.unregister(body["name"])),
        }
        self._fleet = Fleet(config, port, handlers, self._on_worker_death)
        self._models = WorkerModels(self._fleet, loop, lambda *changed: self.leader.forget(*changed))
        self.leader = Leader(
            config,
            self._metrics,
            self._fleet.state,
            self._models,
            ask_counts=lambda: self._fleet.ask("counts"),
            find_plan=self._fleet.plan,
        )
        assert self.leader.controller is not None  # noqa: S101 -- for the type checker: its models are not fixed
        self._controller = self.leader.controller
        self._logs = LogSettings(config.log_level, config.log_format)
        # The requested changes, not the resulting settings: a setting that a model lacks must remain the server's.
        self._settings: dict[str, dict[str, Any]] = {}
        self._settings_lock = threading.Lock()  # every worker gets the changes in the same order

    def maintain(self) -> None:
        """Keep all processes running. An error in it is logged: it must not end the server."""
        self._fleet.maintain()
        self.leader.maintain()

    def drain(self) -> Ending:
        """Have all workers finish what is in flight, and end them."""
        self._stop()
        return self.leader.drain(self._fleet.retire, self._fleet.drain, self._fleet.maintain)

    def close(self) -> None:
        """End everything at once."""
        self._stop()
        try:
            self._fleet.close()
        finally:
            self.leader.close()

    def _stop(self) -> None:
        """Start no further changes."""
        self.leader.stop()
        self._models.close()

    def _on_worker_death(self, worker: str) -> None:
        self._metrics.worker_restarted()
        self.leader.counting.process_died(worker)

    # --- workers' requests --------------------------------------------------------------------------------------------

    def _statistics(self) -> Body:
        found = self.leader.counting.statistics().items()
        statistics = tuple(VersionStatistics(*key, "", snapshot) for key, snapshot in found)
        return {"statistics": to_json(statistics, tuple[VersionStatistics, ...])}

    def _index(self) -> list[list[str]]:
        served = []
        for slot in self._fleet.state.models():
            state = "UNLOADING" if slot.reason == UNLOADING else slot.state.upper()
            served.append(IndexEntry(slot.name, str(slot.version), state, slot.reason))
        return [[line.name, line.version, line.state, line.reason] for line in self._controller.index(served)]

    def _set(self, what: str, changes: Mapping[str, Any], model: str) -> Body:
        """Change the ``logs`` or ``traces`` settings of all workers, including those started later.

        Raises the worker's error for an invalid change, which all workers report alike.
        """
        with self._settings_lock:
            pending = self._fleet.ask("settings", {"what": what, "changes": changes, "model": model})
            answered = answers(pending)
            if not answered:
                raise Unavailable("no worker of this server is running; try again")
            name = f"{what} {model}"
            self._settings[name] = {**self._settings.get(name, {}), **changes}
            body = {"what": what, "changes": self._settings[name], "model": model}
            self._fleet.remember("settings", name, body)
            for worker in pending.keys() - answered.keys():  # a replacement may have started before it was remembered
                self._fleet.ask_one(worker, "settings", body)
            answer = next(iter(answered.values()))
        if what == "logs":
            self._logs.update(answer["settings"])
        return answer

    def _later(self, work: Callable[[Body], Any]) -> Callable[[str, Message], Answer]:
        """Return a handler that runs ``work`` on a thread. If it returns a future, no thread waits for that."""

        async def answer(body: Body) -> Any:
            found = await asyncio.to_thread(work, body)
            return await asyncio.wrap_future(found) if isinstance(found, Future) else found

        return lambda worker, message: asyncio.run_coroutine_threadsafe(answer(message.body), self._loop)
