"""The process that has the fp32 references, as whoever leads it sees it: a server of one process, or a supervisor.

It is there once it is needed, and kept running from then on. Nothing here knows workers.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from bf16kit.errors import Unavailable
from service.drift.shadow import QUEUE_SIZE
from service.drift.verdict import DriftVerdict
from service.peers.channel import Body
from service.peers.child import Child
from service.peers.peer import ENDED, Handler, Message, Peer
from service.process.config import ServerConfig
from service.shadow.fetching import fetch

REFERENCES = "service.shadow.references"
NAME = "the shadow"
# Without an answer. It runs only when nobody else wants a processor, and says nothing while all are taken; one that
# stands still holds up nobody meanwhile.
SILENT_SECONDS = 120.0
_MOST_BYTES = 256 << 20  # of samples that it was given and has not measured yet
_MOST_SAMPLES = 2 * QUEUE_SIZE  # of one model: it drops what is more than its queue, but only while it runs
# Of the gauges, which go with it when it dies, what is to be seen all the same, and as what.
_DOWN, _LAST = "bf16kit_drift_reference_up", "bf16kit_drift_last_sample_timestamp_seconds"
Key = tuple[str, int]  # a model's name, and its version


class _Early(NamedTuple):
    body: Body
    file: int
    told: Future[Body]


class ShadowProcess:
    """Runs from the first sample on, for as long as :meth:`tend` is called by the thread that leads.

    ``counts`` hears what it has counted, ``lost`` that it has died, ``forgotten`` that nothing more of a model will be
    counted, ``verdicts`` what recent drift says of a model. They run on threads that must not be held up. ``shared``:
    several processes choose samples, and the policy's rate is that of all of them.
    """

    def __init__(
        self,
        config: ServerConfig,
        counts: Handler,
        lost: Callable[[], None],
        verdicts: Callable[[DriftVerdict], None] = lambda verdict: None,
        *,
        forgotten: Callable[[str], None] = lambda model: None,
        shared: bool = False,
    ) -> None:
        self._config = config
        self._counts = counts
        self._lost = lost
        self._forgotten = forgotten
        self._shared = shared
        self._lock = threading.RLock()  # what is told of a sample may come back here
        self._held = 0
        self._unanswered: Counter[Key] = Counter()  # samples
        self._asked: Future[Body] = Future()  # what it has counted, the last time
        self._asked.set_result({})
        self._talks = False  # it has begun, which takes a second or two
        self._early: list[_Early] = []  # they came before it was there
        self._wishes: dict[Key, str] = {}  # what it measures
        self._gauges: Sequence[Sequence[Any]] = ()  # of its last counts, those that outlive it
        handlers: dict[str, Handler] = {
            "counts": self._hear,
            "verdict": lambda message: verdicts(DriftVerdict.from_json(message.body)),
        }
        self._child = Child(NAME, REFERENCES, handlers, self._begin, self._bury, silent_seconds=SILENT_SECONDS)

    @property
    def peer(self) -> Peer | None:
        return self._child.peer

    def ask_counts(self) -> Future[Body] | None:
        """What it has counted until now; None where it does not run, has not said anything yet, or does not answer who
        asked before."""
        if (peer := self.peer) is None or not self._talks or not self._asked.done():
            return None
        self._asked = asked = peer.ask("counts")
        asked.add_done_callback(lambda done: None if done.exception() else self._keep(done.result()))
        return asked

    def tend(self) -> None:
        if self._wishes or self._child.pid is not None:
            self._child.tend()

    def close(self) -> None:
        """End it at once: what it measures is lost."""
        self._child.retire()
        self._child.kill()
        self._child.wait(0.0)
        with self._lock:
            early, self._early = self._early, []
        for each in early:
            os.close(each.file)
            each.told.set_exception(Unavailable(f"{NAME} of this server has ended", ENDED))

    def give(self, message: Message) -> Future[Body]:
        """Hand samples on; the answer says what became of each, and is Unavailable where the process died with them.

        Raises OSError, or answers with it, where no file is left."""
        told: Future[Body] = Future()
        body: Body = {**message.body, "shared": self._shared}
        nbytes = int(body["nbytes"])
        with self._lock:
            key = body["model"], int(body["version"])
            self._wishes[key] = body["wish"]
            peer = self.peer
            room = self._held + nbytes <= _MOST_BYTES and self._unanswered[key] < _MOST_SAMPLES
            if room:
                if peer is None:
                    self._early.append(_Early(body, os.dup(message.files[0]), told))
                self._held += nbytes
                self._unanswered[key] += len(body["samples"])
        if room and peer is not None:
            self._ask(peer, body, message.files[0], told)
        elif not room:
            told.set_result({"outcomes": ["dropped"] * len(body["samples"])})
        return told

    def ask(self, kind: str, body: Mapping[str, object], files: list[int]) -> Future[Body]:
        """The same for whoever would otherwise ask a supervisor."""
        return self.give(Message(dict(body), tuple(files)))

    def forget(self, model: str, wish: str = "") -> None:
        """It was loaded anew, or unloaded: its references are not needed any more; where ``wish`` says what was
        loaded, that one alone."""
        with self._lock:
            gone = [key for key, known in self._wishes.items() if key[0] == model and wish in ("", known)]
            for key in gone:
                del self._wishes[key]
            early = [each for each in self._early if each.body["model"] == model and wish in ("", each.body["wish"])]
            self._early = [each for each in self._early if each not in early]
        for each in early:
            os.close(each.file)
            self._count_out(each.body)
            each.told.set_result({"outcomes": ["dropped"] * len(each.body["samples"])})
        if (peer := self.peer) is None:
            self._tell_left()
            self._forgotten(model)
        elif gone:
            told = peer.ask("forget", {"keys": gone})
            told.add_done_callback(lambda done: self._forget(model, done))

    def restart(self, model: str, version: int) -> None:
        """What comes from now on was answered by another precision: recent drift begins anew."""
        if (peer := self.peer) is not None:  # if not, it begins anew in any case
            peer.tell("restart", {"model": model, "version": version})

    def evidence(self, model: str, version: int) -> bytes:
        """See :func:`service.shadow.fetching.fetch`."""
        return fetch(lambda: self.peer, model, version)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _ask(self, peer: Peer, body: Body, file: int, told: Future[Body]) -> None:
        asked = peer.ask("samples", body, [file])
        asked.add_done_callback(partial(self._answer, body, told))

    def _answer(self, body: Body, told: Future[Body], done: Future[Body]) -> None:
        self._count_out(body)
        error = done.exception()
        if error is None:
            self._talks = True
            told.set_result(done.result())
        else:
            told.set_exception(error)

    def _count_out(self, body: Body) -> None:
        with self._lock:
            self._held -= int(body["nbytes"])
            self._unanswered[body["model"], int(body["version"])] -= len(body["samples"])

    def _begin(self, peer: Peer) -> None:
        config = self._config
        told = {"log_level": config.log_level, "log_format": config.log_format, "evidence": config.evidence}
        peer.tell("start", told)
        with self._lock:
            early, self._early = self._early, []
            for wish in self._wishes.values():
                peer.tell("measure", {"wish": wish})
            for each in early:  # whoever forgets a model meanwhile says so after them
                self._ask(peer, each.body, each.file, each.told)
                os.close(each.file)

    def _hear(self, message: Message) -> None:
        self._talks = True
        self._keep(message.body)
        self._counts(message)

    def _keep(self, told: Body) -> None:
        self._gauges = [family for family in told["metrics"] if family[0] in (_DOWN, _LAST)]

    def _bury(self) -> None:
        """What it has counted stays, and it is not forgotten that it should be there."""
        self._talks = False
        self._lost()
        self._tell_left()

    def _tell_left(self) -> None:
        """What outlives it, of the models that it is to measure."""
        with self._lock:
            known = set(self._wishes)
        left = [_after_death(_of(family, known)) for family in self._gauges]
        self._counts(Message({"metrics": left, "statistics": []}))

    def _forget(self, model: str, done: Future[Body]) -> None:
        if done.exception() is None:
            self._hear(Message(done.result()))  # without it
        self._forgotten(model)


def _of(family: Sequence[Any], known: Container[Key]) -> list[Any]:
    *head, series = family
    return [*head, [each for each in series if (each[1]["model"], int(each[1]["version"])) in known]]


def _after_death(family: Sequence[Any]) -> list[Any]:
    """``family`` as :meth:`service.telemetry.whole.Family.as_json` has it."""
    *head, series = family
    down = family[0] == _DOWN
    return [*head, [[name, labels, 0.0 if down else value, exemplar] for name, labels, value, exemplar in series]]
