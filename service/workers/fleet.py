"""The workers of one server: kept running, told together, and looked at as one."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import nullcontext
from typing import Any

from bf16kit.errors import Unavailable
from service.models.plan import Wish
from service.peers.channel import Body
from service.peers.child import SILENT_SECONDS, Child
from service.peers.peer import ENDED, Answer, Handler, Message, Peer
from service.process.config import ServerConfig
from service.process.stop import Ending
from service.sharedmemory import open_regions
from service.workers.placement import VISIBLE, gpu_for, gpus
from service.workers.regions import FleetRegions
from service.workers.view import Key, Report, View
from service.workers.weightowner import WeightOwner

_log = logging.getLogger(__name__)
WORKER = "service.workers.worker"
_LATE_SECONDS = 3.0  # for a worker to tell how its drain ended, once its time is over


class Fleet:
    """:meth:`tend` keeps the workers running, called again and again by one thread; everything else is for any thread.

    ``handlers`` answer what a worker, whose name they are given, tells or asks beside its reports; ``lost`` is told the
    name of one that died.
    """

    def __init__(
        self,
        config: ServerConfig,
        port: int,
        *,
        handlers: Mapping[str, Callable[[str, Message], Answer]] | None = None,
        lost: Callable[[str], None] = lambda worker: None,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._config = config
        self._port = port
        self._weights = WeightOwner()
        self._weights.start()
        table = open_regions(config)
        self._regions = None if table is None else FleetRegions(table, self._peers)
        self._wishes: dict[str, Wish] = {}
        self._trying: Wish | None = None
        self._state: dict[tuple[str, str], Mapping[str, Any]] = {}  # by kind and name
        self._handlers = dict(handlers or {})
        self._lost = lost
        self._lock = threading.Lock()
        self._retired = False
        self._reports: list[Report | None] = [None] * config.workers
        self._callbacks: list[Callable[[], None]] = []
        self.view = self._whole()
        available = gpus(os.environ) if config.device in ("auto", "cuda") else []
        self.workers = [self._worker(index, available, silent_seconds) for index in range(config.workers)]

    def subscribe(self, callback: Callable[[], None]) -> None:
        """``callback`` runs, on any thread, after every change of the view; it must not block."""
        self._callbacks.append(callback)

    @property
    def wishes(self) -> Mapping[str, Wish]:
        """What every worker is to serve, by model; one that is started again is told so."""
        return dict(self._wishes)

    def change(self, wishes: Mapping[str, Wish], trying: Wish | None = None) -> None:
        """``wishes`` are what is wanted from now on, of which ``trying`` is being tried; nobody is told."""
        with self._lock:
            self._wishes, self._trying = dict(wishes), trying
            changed = self._look()
        if changed:
            self._changed()

    def remember(self, kind: str, name: str, body: Mapping[str, Any]) -> None:
        """Have every worker that is started be told this, too."""
        with self._lock:
            self._state[kind, name] = body

    def forget(self, kind: str, name: str) -> None:
        """Tell no worker any more what of this kind was remembered by this name."""
        with self._lock:
            self._state.pop((kind, name), None)

    def wants(self, model: str, version: int, wish: str) -> bool:
        """Whether ``wish``, in JSON, is what this version is to be served by, or is being tried with."""
        with self._lock:
            wishes = [each for each in (self._wishes.get(model), self._trying) if each is not None]
        plans = [plan for each in wishes if each.name == model for plan in each.plans if plan.version == version]
        return any(Wish(model, (plan,)).to_json() == wish for plan in plans)

    def ask(self, kind: str, body: Mapping[str, Any] | None = None) -> dict[str, Future[Body]]:
        """Every worker that runs, by its name, those first that serve."""
        return {name: self.ask_one(name, kind, body) for name in self.running}

    def ask_one(self, name: str, kind: str, body: Mapping[str, Any] | None = None) -> Future[Body]:
        """The worker of this name. Unavailable where it does not run."""
        peer = next((worker.peer for worker in self.workers if worker.name == name), None)
        if peer is None:
            told: Future[Body] = Future()
            told.set_exception(Unavailable(f"{name} of this server is being started; try again", ENDED))
            return told
        return peer.ask(kind, body)

    @property
    def running(self) -> list[str]:
        """The names of the workers that run, those first that serve."""
        order = sorted((report is None or not report.listening, index) for index, report in enumerate(self._reports))
        return [self.workers[index].name for _, index in order if self.workers[index].peer is not None]

    def tend(self) -> None:
        for worker in self.workers:
            worker.tend()

    def tell(self, kind: str, body: Mapping[str, Any] | None = None) -> None:
        """Every worker that runs."""
        for peer in self._peers():
            peer.tell(kind, body)

    def retire(self) -> None:
        """From now on not ready, so that load balancers send no more; whoever still comes is answered."""
        with self._lock:
            self._retired = True
            self._look()
        self.tell("retire")
        self._changed()

    def drain(self, seconds: float) -> Ending:
        """Have all workers answer what they have and refuse what is new, for ``seconds`` at most; then they end."""
        self.retire()
        until = time.monotonic() + seconds + _LATE_SECONDS
        for worker in self.workers:
            worker.retire()
        asked = [
            peer.ask("drain", {"seconds": seconds}) for worker in self.workers if (peer := worker.peer) is not None
        ]
        wait(asked, max(0.0, until - time.monotonic()))
        endings = [told.result() for told in asked if told.done() and told.exception() is None]
        for worker in self.workers:
            if (peer := worker.peer) is not None:
                peer.close()  # it has said its last word, and ends
            worker.wait(_LATE_SECONDS)
        answered = len(endings) == len(asked) and all(ending["answered"] for ending in endings)
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
                "report": lambda message: self._hear(index, message),
                **handlers,
                **({} if self._regions is None else self._regions.handlers),
            },
            lambda peer: self._begin(index, peer),
            lambda: self._bury(index, name),
            environment=None if gpu is None else {**os.environ, VISIBLE: gpu},
            silent_seconds=silent_seconds,
        )

    def _begin(self, index: int, peer: Peer) -> None:
        """What a worker is told first: it has nothing of its own to remember."""
        config = self._config.model_copy(update={"grpc_port": self._port}).model_dump(mode="json")
        regions = self._regions
        with self._lock, nullcontext() if regions is None else regions.lock:
            others = any(report is not None and report.listening for report in self._reports)
            with self._weights.connect() as weights:
                told = {"config": config, "number": index + 1, "patient": others, **self._desired()}
                peer.tell("start", told, [weights.fileno()])
            if regions is not None:
                regions.tell_all(peer)
            for (kind, _), body in self._state.items():
                peer.tell(kind, body)
            peer.tell("view", self.view.as_json())

    def _bury(self, index: int, name: str) -> None:
        self._report(index, None)
        self._lost(name)

    def _hear(self, index: int, message: Message) -> None:
        self._report(index, Report.from_json(message.body))

    def _report(self, index: int, report: Report | None) -> None:
        with self._lock:
            self._reports[index] = report
            changed = self._look()
        if changed:
            self._changed()

    def _desired(self) -> dict[str, list[str]]:
        return {"wishes": [wish.to_json() for wish in self._wishes.values()]}

    def _wanted(self) -> list[Key]:
        wishes = [*self._wishes.values(), *([] if self._trying is None else [self._trying])]
        return [(wish.name, plan.version) for wish in wishes for plan in wish.plans]

    def _whole(self) -> View:
        return View.of(self._reports, self._wanted(), retired=self._retired)

    def _look(self) -> bool:
        """Make the view anew, and tell all workers; whether it is another. Called with the lock held, which keeps what
        they are told in order."""
        before, self.view = self.view, self._whole()
        if self.view == before:
            return False
        if self.view.ready != before.ready:
            _log.info("ready" if self.view.ready else "not ready")
        self.tell("view", self.view.as_json())
        return True

    def _changed(self) -> None:
        for callback in self._callbacks:
            callback()
