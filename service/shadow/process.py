"""Live drift where several processes serve: one more has the references, and is there once it is needed.

Nothing here knows workers: a server of one process may keep such a process as well.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from bf16kit.errors import Unavailable
from service.drift.observer import OutcomeObserver
from service.drift.sampling import Sample
from service.drift.shadow import QUEUE_SIZE
from service.models.plan import Plan, Wish
from service.peers.channel import Body
from service.peers.child import Child
from service.peers.peer import Handler, Message, Peer
from service.process.config import ServerConfig
from service.shadow.samples import pack

REFERENCES = "service.shadow.references"
NAME = "the shadow"
_MOST_BYTES = 256 << 20  # of samples that it was given and has not taken or refused yet


class _Early(NamedTuple):
    body: Body
    file: int
    told: Future[Body]


class ShadowProcess:
    """Runs from the first sample on, for as long as :meth:`tend` is called by whoever tends the workers. ``counts``
    hears what it has counted, ``lost`` that it has died."""

    def __init__(self, config: ServerConfig, counts: Handler, lost: Callable[[], None]) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._held = 0
        self._early: list[_Early] = []  # they came before it was there
        self._needed = False
        self._child = Child(NAME, REFERENCES, {"counts": counts}, self._begin, lost)

    @property
    def peer(self) -> Peer | None:
        return self._child.peer

    def tend(self) -> None:
        if self._needed:
            self._child.tend()

    def close(self) -> None:
        """End it at once: what it measures is lost."""
        self._child.retire()
        self._child.kill()
        self._child.wait(0.0)

    def give(self, message: Message) -> Future[Body]:
        """Hand a sample on; the answer says whether it was taken."""
        told: Future[Body] = Future()
        nbytes = int(message.body["nbytes"])
        with self._lock:
            self._needed = True
            peer, room = self.peer, self._held + nbytes <= _MOST_BYTES
            if peer is None and room and len(self._early) < QUEUE_SIZE:
                self._early.append(_Early(message.body, os.dup(message.files[0]), told))
                return told
            if peer is not None and room:
                self._held += nbytes
        if peer is None or not room:
            told.set_result({"taken": False})
            return told
        return self._ask(peer, message.body, message.files[0])

    def _ask(self, peer: Peer, body: Body, file: int) -> Future[Body]:
        asked = peer.ask("sample", body, [file])
        asked.add_done_callback(lambda done: self._give_back(int(body["nbytes"])))
        return asked

    def forget(self, model: str) -> None:
        """It was loaded anew, or unloaded: its reference is not needed any more."""
        if (peer := self.peer) is not None:
            peer.tell("forget", {"model": model})

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self._held -= nbytes

    def _begin(self, peer: Peer) -> None:
        peer.tell("start", {"log_level": self._config.log_level, "log_format": self._config.log_format})
        with self._lock:
            early, self._early = self._early, []
            self._held += sum(int(each.body["nbytes"]) for each in early)
        for each in early:
            self._ask(peer, each.body, each.file).add_done_callback(partial(_pass_on, each.told))
            os.close(each.file)


def _pass_on(told: Future[Body], done: Future[Body]) -> None:
    error = done.exception()
    if error is None:
        told.set_result(done.result())
    else:
        told.set_exception(error)


class Hander:
    """The side of a process that serves: hands samples to whoever has the references. ``ask`` is its peer's."""

    def __init__(self, ask: Callable[[str, Mapping[str, object], list[int]], Future[Body]]) -> None:
        self._ask = ask

    def hand(self, name: str, plan: Plan, sample: Sample, observer: OutcomeObserver) -> None:
        """See :data:`service.models.reconciler.HandPlanned`."""
        try:
            body, file = pack(sample)
            try:
                asked = self._ask("sample", {**body, "wish": Wish(name, (plan,)).to_json()}, [file])
            finally:
                os.close(file)
        except OSError:  # for want of files or memory: the request has its answer, and does not fail for its sample
            observer.sampled("failed", sample.rows)
            return

        def told(done: Future[Body]) -> None:
            error = done.exception()
            if isinstance(error, Unavailable):
                observer.sampled("failed", sample.rows)  # the process died with it
            elif error is not None or not done.result()["taken"]:
                observer.sampled("dropped", sample.rows)

        asked.add_done_callback(told)
