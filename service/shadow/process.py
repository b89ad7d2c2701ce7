"""Leads the process with the fp32 references, for a server of one process or a supervisor.

The process starts when it is first needed and is kept running from then on. Nothing here depends on workers.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from bf16kit.errors import Unavailable
from service.drift.shadow import QUEUE_SIZE
from service.drift.verdict import DriftVerdict
from service.peers.channel import Body
from service.peers.child import Child
from service.peers.peer import ENDED, Handler, Message, Peer
from service.process.config import ServerConfig
from service.shadow.blame import CrashTracker
from service.shadow.board import Key, label_of
from service.shadow.fetching import fetch
from service.shadow.gauges import Gauges

_log = logging.getLogger(__name__)
REFERENCES = "service.shadow.references"
NAME = "the shadow"
# Longest time without an answer. The process runs only while no other needs a processor, so it may be silent for long;
# nobody waits for it meanwhile.
SILENT_SECONDS = 120.0
_MOST_BYTES = 256 << 20  # of samples sent to it and not yet measured
_MOST_SAMPLES = 2 * QUEUE_SIZE  # per model; the process drops samples beyond its queue, but only while it runs
#: Whether a version is to be served as this desired model (JSON) says; it holds this version only.
Wanted = Callable[[str, int, str], bool]


class _Early(NamedTuple):
    body: Body
    file: int
    told: Future[Body]

    @property
    def key(self) -> Key:
        return _key(self.body)


class ShadowProcess:
    """Runs the process from the first sample on, for as long as the leading thread calls :meth:`maintain`.

    ``counts`` receives its counts, ``process_died`` its death, and ``verdicts`` the verdicts on models' recent drift.
    ``forgotten`` is told that some of a model's versions will not be counted any more. These callbacks run on threads
    that must not block. ``shared``: several processes choose samples, and the policy's rate applies to all of them
    together. ``wanted`` then says which versions they serve, because a sample may arrive after its model was unloaded
    everywhere else.
    """

    def __init__(
        self,
        config: ServerConfig,
        counts: Handler,
        on_death: Callable[[], None],
        verdicts: Callable[[DriftVerdict], None] = lambda verdict: None,
        *,
        forgotten: Callable[[str, Collection[int]], None] = lambda model, versions: None,
        shared: bool = False,
        wanted: Wanted | None = None,
    ) -> None:
        self._config = config
        self._counts = counts
        self._on_death = on_death
        self._forgotten = forgotten
        self._shared = shared
        self._wanted = wanted
        self._lock = threading.RLock()  # reporting a sample's outcome may call back into this class
        self._held = 0
        self._unanswered: Counter[Key] = Counter()  # samples
        self._asked: Future[Body] = Future()  # the last request for its counts
        self._asked.set_result({})
        self._talks = False  # it has answered since it started, which takes a second or two
        self._early: list[_Early] = []  # samples that came before it had started
        self._desired_models: dict[Key, str] = {}  # the versions that it measures
        self._off: dict[Key, str] = {}  # versions that stay off because they kill it again and again, and why
        self._gauges = Gauges()
        self._blame = CrashTracker()
        handlers: dict[str, Handler] = {
            "counts": self._hear,
            "verdict": lambda message: verdicts(DriftVerdict.from_json(message.body)),
        }
        self._child = Child(
            NAME, REFERENCES, handlers, self._begin, self._bury, silent_seconds=SILENT_SECONDS, expendable=True
        )

    @property
    def peer(self) -> Peer | None:
        return self._child.peer

    def ask_counts(self) -> Future[Body] | None:
        """Ask for its current counts; None if it does not run or has not answered yet, also since the last request."""
        if (peer := self.peer) is None or not self._talks or not self._asked.done():
            return None
        told: Future[Body] = Future()
        self._asked = told
        peer.ask("counts").add_done_callback(lambda done: self._pass_on(done, told))
        return told

    def off_reason(self, model: str, version: int) -> str:
        """Return why a reference stays off, for users; "" if it does not."""
        return self._off.get((model, version), "")

    def maintain(self) -> None:
        if self._desired_models or self._child.pid is not None:
            self._child.maintain()

    def close(self) -> None:
        """End the process at once. Samples being measured are lost."""
        self._child.retire()
        self._child.kill()
        self._child.wait(0.0)
        with self._lock:
            early, self._early = self._early, []
        for each in early:
            os.close(each.file)
            each.told.set_exception(Unavailable(f"{NAME} of this server has ended", ENDED))

    def give(self, message: Message) -> Future[Body]:
        """Hand samples on. The future gives their outcomes, or fails with Unavailable if the process dies with them.

        Raises OSError, or fails with it, if no file descriptor is left.
        """
        told: Future[Body] = Future()
        body: Body = {**message.body, "shared": self._shared}
        key = _key(body)
        with self._lock:  # held until the samples are sent, so that "forget" for the model follows them
            new = key not in self._desired_models
            refused = self._refused(key, body)
            if not refused:
                self._hand_on(body, message.files[0], told)
            if new:
                self._tell_left()
        if refused:
            told.set_result({"outcomes": [refused] * len(body["samples"])})
        return told

    def ask(self, kind: str, body: Mapping[str, object], files: list[int]) -> Future[Body]:
        """Call :meth:`give`, with the signature of a request to a supervisor."""
        return self.give(Message(dict(body), tuple(files)))

    def forget(self, model: str, desired: str = "") -> None:
        """Drop the references of a model that was reloaded or unloaded.

        With ``desired``, only the version loaded by it; else all of its versions that are not wanted as they were.
        """

        def is_gone(key: Key, known: str) -> bool:
            if desired:
                return key[0] == model and known == desired
            return key[0] == model and (self._wanted is None or not self._wanted(*key, known))

        with self._lock:
            gone = [key for key, known in self._desired_models.items() if is_gone(key, known)]
            for key in gone:
                del self._desired_models[key]
                self._off.pop(key, None)
            early = [each for each in self._early if is_gone(each.key, each.body["wish"])]
            self._early = [each for each in self._early if each not in early]
            peer = self.peer
            asked = peer.ask("forget", {"keys": gone}) if peer is not None and gone else None
        for each in early:
            os.close(each.file)
            self._count_out(each.body)
            each.told.set_result({"outcomes": ["dropped"] * len(each.body["samples"])})
        versions = [version for _, version in gone]
        if asked is not None:
            asked.add_done_callback(lambda done: self._forget(model, versions, done))
        elif peer is None:
            with self._lock:
                self._tell_left()
            self._forgotten(model, versions)

    def restart(self, model: str, version: int) -> None:
        """Begin recent drift anew: another precision answers from now on."""
        if (peer := self.peer) is not None:  # a process that starts later begins anew anyway
            peer.tell("restart", {"model": model, "version": version})

    def evidence(self, model: str, version: int) -> bytes:
        """See :func:`service.shadow.fetching.fetch`."""
        return fetch(lambda: self.peer, model, version)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _refused(self, key: Key, body: Body) -> str:
        """Return the outcome of these samples if they are not to be handed on, else "". The caller holds the lock."""
        if self._wanted is not None and not self._wanted(*key, body["wish"]):
            return "dropped"  # in flight while their model was unloaded
        if self._desired_models.get(key) != body["wish"]:
            self._off.pop(key, None)  # it applied to the version loaded before
            self._desired_models[key] = body["wish"]
        if key in self._off:
            return "failed"
        room = self._held + int(body["nbytes"]) <= _MOST_BYTES and self._unanswered[key] < _MOST_SAMPLES
        return "" if room else "dropped"

    def _hand_on(self, body: Body, file: int, told: Future[Body]) -> None:
        """Send the samples, or keep them until the process starts. The caller holds the lock."""
        peer = self.peer
        if peer is None:
            self._early.append(_Early(body, os.dup(file), told))
        self._held += int(body["nbytes"])
        self._unanswered[_key(body)] += len(body["samples"])
        if peer is not None:
            self._ask(peer, body, file, told)

    def _ask(self, peer: Peer, body: Body, file: int, told: Future[Body]) -> None:
        asked = peer.ask("samples", body, [file])
        asked.add_done_callback(partial(self._answer, body, told))

    def _answer(self, body: Body, told: Future[Body], done: Future[Body]) -> None:
        self._count_out(body)
        error = done.exception()
        if error is None:
            with self._lock:
                self._talks = True
            told.set_result(done.result())
        else:
            told.set_exception(error)

    def _count_out(self, body: Body) -> None:
        with self._lock:
            self._held -= int(body["nbytes"])
            self._unanswered[_key(body)] -= len(body["samples"])

    def _begin(self, peer: Peer) -> None:
        config, board = self._config, self._blame.begin()
        told = config.model_dump(mode="json", include={"log_level", "log_format", "evidence", "reference_ca"})
        try:
            peer.tell("start", {**told, "one_by_one": self._blame.one_by_one}, [board])
        finally:
            os.close(board)
        with self._lock:
            early, self._early = self._early, []
            for key, desired in self._desired_models.items():
                if key not in self._off:
                    peer.tell("measure", {"wish": desired})
            for each in early:  # a concurrent "forget" for a model follows them
                if each.key not in self._off:
                    self._ask(peer, each.body, each.file, each.told)
                else:
                    self._count_out(each.body)
                    each.told.set_result({"outcomes": ["failed"] * len(each.body["samples"])})
                os.close(each.file)

    def _hear(self, message: Message) -> None:
        with self._lock:  # _tell_left() meanwhile would look like counters that restart
            self._talks = True
            self._counts(Message(self._whole(message.body)))

    def _pass_on(self, done: Future[Body], told: Future[Body]) -> None:
        error = done.exception()
        if error is None:
            told.set_result(self._whole(done.result()))
        else:
            told.set_exception(error)

    def _whole(self, told: Body) -> Body:
        """Return its counts, with expected references that it does not mention marked as down."""
        self._gauges.keep(told["metrics"])
        return {**told, "metrics": self._gauges.whole(told["metrics"], self._known())}

    def _known(self) -> list[Key]:
        with self._lock:
            return list(self._desired_models)

    def _bury(self) -> None:
        """Handle its death: its counts and its list of models are kept, and a reference that killed it stays off."""
        culprit = self._blame.died(self._known())
        if culprit is not None:
            _log.error("%s: no live drift: %s", label_of(culprit.key), culprit.reason)
        with self._lock:
            if culprit is not None:
                self._off[culprit.key] = culprit.reason
            self._talks = False
            self._on_death()
            self._tell_left()

    def _tell_left(self) -> None:
        """Report what outlives it for its models, unless it reports itself. The caller holds the lock."""
        if not self._talks:
            self._counts(Message({"metrics": self._gauges.left(self._known()), "statistics": []}))

    def _forget(self, model: str, versions: Collection[int], done: Future[Body]) -> None:
        if done.exception() is None:
            self._hear(Message(done.result()))  # without that model
        self._forgotten(model, versions)


def _key(body: Body) -> Key:
    return body["model"], int(body["version"])
