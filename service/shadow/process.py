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
from typing import Any, NamedTuple

from bf16kit.messages.errors import Unavailable
from service.config.serverconfig import ServerConfig
from service.drift.shadow import QUEUE_SIZE
from service.drift.verdict import DriftVerdict
from service.models.plan import DesiredModel, Plan
from service.peers.channel import Body
from service.peers.child import Child
from service.peers.peer import ENDED, Handler, Message, Peer
from service.shadow.activity import Key, label_of
from service.shadow.crashtracker import CrashTracker
from service.shadow.fetching import fetch_evidence
from service.shadow.gauges import LastGauges

_log = logging.getLogger(__name__)
REFERENCES = "service.shadow.references"
NAME = "the shadow"
# Longest time without an answer. A measuring thread may hold Python's lock without a turn on a processor for a while;
# nobody waits for the process meanwhile.
SILENT_SECONDS = 120.0
_MAX_BYTES = 256 << 20  # of samples sent to it and not yet measured
_MAX_SAMPLES = 2 * QUEUE_SIZE  # per model; the process drops samples beyond its queue, but only while it runs
#: Returns the plan of this digest by which a model's version is to be served; None if there is none.
FindPlan = Callable[[str, int, str], Plan | None]


class _EarlyMessage(NamedTuple):
    body: Body
    file: int
    outcomes: Future[Body]

    @property
    def key(self) -> Key:
        return _key(self.body)


class ShadowProcess:
    """Runs the process from the first sample on, for as long as the leading thread calls :meth:`maintain`.

    ``counts`` receives its counts, ``process_died`` its death, and ``verdicts`` the verdicts on models' recent drift.
    ``on_forget`` is called when some of a model's versions will not be counted any more. These callbacks run on threads
    that must not block. ``shared``: several processes choose samples, and the policy's rate applies to all of them
    together. ``find_plan`` then knows the plans that they serve, because a sample may arrive after its model was
    unloaded everywhere else.
    """

    def __init__(
        self,
        config: ServerConfig,
        counts: Handler,
        on_death: Callable[[], None],
        verdicts: Callable[[DriftVerdict], None] = lambda verdict: None,
        *,
        on_forget: Callable[[str, Collection[int]], None] = lambda model, versions: None,
        shared: bool = False,
        find_plan: FindPlan | None = None,
    ) -> None:
        self._config = config
        self._counts = counts
        self._on_death = on_death
        self._on_forget = on_forget
        self._shared = shared
        self._find_plan = find_plan
        self._lock = threading.RLock()  # reporting a sample's outcome may call back into this class
        self._bytes_in_flight = 0
        self._in_flight: Counter[Key] = Counter()  # samples
        self._counts_request: Future[Body] = Future()  # the last request for its counts
        self._counts_request.set_result({})
        self._responding = False  # it has answered since it started, which takes a second or two
        self._early: list[_EarlyMessage] = []  # samples that came before it had started
        self._started: Peer | None = None  # the peer to which the start has been sent, which must come first
        self._plans: dict[Key, Plan] = {}  # of the versions that it measures
        self._off: dict[Key, str] = {}  # versions that stay off because they kill it again and again, and why
        self._gauges = LastGauges()
        self._crashes = CrashTracker()
        handlers: dict[str, Handler] = {
            "counts": self._receive_counts,
            "verdict": lambda message: verdicts(DriftVerdict.from_json(message.body)),
        }
        self._child = Child(
            NAME, REFERENCES, handlers, self._start, self._handle_death, silent_seconds=SILENT_SECONDS, expendable=True
        )

    @property
    def peer(self) -> Peer | None:
        started = self._started
        return started if started is self._child.peer else None

    def ask_counts(self) -> Future[Body] | None:
        """Ask for its current counts; None if it does not run or has not answered yet, also since the last request."""
        if (peer := self.peer) is None or not self._responding or not self._counts_request.done():
            return None
        counts: Future[Body] = Future()
        self._counts_request = counts
        peer.ask("counts").add_done_callback(lambda done: self._forward_counts(done, counts))
        return counts

    def off_reason(self, model: str, version: int) -> str:
        """Return why a reference stays off, for users; "" if it does not."""
        return self._off.get((model, version), "")

    def maintain(self) -> None:
        if self._plans or self._child.pid is not None:
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
            each.outcomes.set_exception(Unavailable(f"{NAME} of this server has ended", ENDED))

    def forward(self, message: Message) -> Future[Body]:
        """Forward a worker's samples to the process.

        The future gives their outcomes, or fails with Unavailable if the process dies with them. Raises OSError, or
        fails with it, if no file descriptor is left.
        """
        body, find_plan = message.body, self._find_plan
        return self._forward(
            body, message.files[0], lambda: None if find_plan is None else find_plan(*_key(body), body["plan"])
        )

    def ask(self, plan: Plan, kind: str, body: Mapping[str, object], files: list[int]) -> Future[Body]:
        """Forward samples of the version loaded by ``plan`` in this process, as :meth:`forward` does."""
        return self._forward(body, files[0], lambda: plan)

    def forget(self, model: str, digest: str = "") -> None:
        """Drop the references of a model that was reloaded or unloaded.

        With ``digest``, only the version loaded by this plan; else all versions that are not wanted as they were.
        """

        def is_gone(key: Key, known: str) -> bool:
            if digest:
                return key[0] == model and known == digest
            return key[0] == model and (self._find_plan is None or self._find_plan(*key, known) is None)

        with self._lock:
            gone = [key for key, known in self._plans.items() if is_gone(key, known.digest)]
            for key in gone:
                del self._plans[key]
                self._off.pop(key, None)
            early = [each for each in self._early if is_gone(each.key, each.body["plan"])]
            self._early = [each for each in self._early if each not in early]
            peer = self.peer
            request = peer.ask("forget", {"keys": gone}) if peer is not None and gone else None
        for each in early:
            os.close(each.file)
            self._release(each.body)
            each.outcomes.set_result({"outcomes": ["dropped"] * len(each.body["samples"])})
        versions = [version for _, version in gone]
        if request is not None:
            request.add_done_callback(lambda done: self._forget(model, versions, done))
        elif peer is None:
            with self._lock:
                self._report_gauges()
            self._on_forget(model, versions)

    def restart(self, model: str, version: int) -> None:
        """Begin recent drift anew: another precision answers from now on."""
        if (peer := self.peer) is not None:  # a process that starts later begins anew anyway
            peer.tell("restart", {"model": model, "version": version})

    def evidence(self, model: str, version: int) -> bytes:
        """See :func:`service.shadow.fetching.fetch_evidence`."""
        return fetch_evidence(lambda: self.peer, model, version)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _forward(self, body: Mapping[str, Any], file: int, find_plan: Callable[[], Plan | None]) -> Future[Body]:
        outcomes: Future[Body] = Future()
        body = {**body, "shared": self._shared}
        key = _key(body)
        with self._lock:  # held until the samples are sent, so that "forget" for the model follows them
            plan, new = find_plan(), key not in self._plans
            # Without a plan they were in flight while their model was unloaded.
            rejection = "dropped" if plan is None else self._rejection(key, plan, body)
            if not rejection:
                self._send_or_keep(body, file, outcomes)
            if new and plan is not None:
                self._report_gauges()
        if rejection:
            outcomes.set_result({"outcomes": [rejection] * len(body["samples"])})
        return outcomes

    def _rejection(self, key: Key, plan: Plan, body: Body) -> str:
        """Return the outcome of these samples if they are not to be sent, else "". The caller holds the lock."""
        known = self._plans.get(key)
        if known is None or known.digest != plan.digest:
            self._off.pop(key, None)  # it applied to the version loaded before
            self._plans[key] = plan
            if (peer := self.peer) is not None:
                _measure(peer, key, plan)
        if key in self._off:
            return "failed"
        room = self._bytes_in_flight + int(body["nbytes"]) <= _MAX_BYTES and self._in_flight[key] < _MAX_SAMPLES
        return "" if room else "dropped"

    def _send_or_keep(self, body: Body, file: int, outcomes: Future[Body]) -> None:
        """Send the samples, or keep them until the process starts. The caller holds the lock."""
        peer = self.peer
        if peer is None:
            self._early.append(_EarlyMessage(body, os.dup(file), outcomes))
        self._bytes_in_flight += int(body["nbytes"])
        self._in_flight[_key(body)] += len(body["samples"])
        if peer is not None:
            self._send(peer, body, file, outcomes)

    def _send(self, peer: Peer, body: Body, file: int, outcomes: Future[Body]) -> None:
        request = peer.ask("samples", body, [file])
        request.add_done_callback(partial(self._complete, body, outcomes))

    def _complete(self, body: Body, outcomes: Future[Body], done: Future[Body]) -> None:
        self._release(body)
        error = done.exception()
        if error is None:
            with self._lock:
                self._responding = True
            outcomes.set_result(done.result())
        else:
            outcomes.set_exception(error)

    def _release(self, body: Body) -> None:
        with self._lock:
            self._bytes_in_flight -= int(body["nbytes"])
            self._in_flight[_key(body)] -= len(body["samples"])

    def _start(self, peer: Peer) -> None:
        config, tracker_memory = self._config, self._crashes.process_started()
        settings = config.model_dump(mode="json", include={"log_level", "log_format", "evidence", "reference_ca"})
        try:
            peer.tell("start", {**settings, "one_by_one": self._crashes.one_by_one}, [tracker_memory])
        finally:
            os.close(tracker_memory)
        with self._lock:
            early, self._early = self._early, []
            for key, plan in self._plans.items():
                if key not in self._off:
                    _measure(peer, key, plan)
            for each in early:  # a concurrent "forget" for a model follows them
                if each.key not in self._off:
                    self._send(peer, each.body, each.file, each.outcomes)
                else:
                    self._release(each.body)
                    each.outcomes.set_result({"outcomes": ["failed"] * len(each.body["samples"])})
                os.close(each.file)
            self._started = peer

    def _receive_counts(self, message: Message) -> None:
        with self._lock:  # _report_gauges() meanwhile would look like counters that restart
            self._responding = True
            self._counts(Message(self._with_gauges(message.body)))

    def _forward_counts(self, done: Future[Body], counts: Future[Body]) -> None:
        error = done.exception()
        if error is None:
            counts.set_result(self._with_gauges(done.result()))
        else:
            counts.set_exception(error)

    def _with_gauges(self, counts: Body) -> Body:
        """Return its counts, with expected references that it does not mention marked as down."""
        if not counts["complete"]:  # nothing has changed
            return counts
        self._gauges.keep(counts["metrics"])
        return {**counts, "metrics": self._gauges.with_missing_down(counts["metrics"], self._known())}

    def _known(self) -> list[Key]:
        with self._lock:
            return list(self._plans)

    def _handle_death(self) -> None:
        """Handle its death: its counts and its list of models are kept, and a reference that killed it stays off."""
        culprit = self._crashes.process_died(self._known())
        if culprit is not None:
            _log.error("%s: no live drift: %s", label_of(culprit.key), culprit.reason)
        with self._lock:
            if culprit is not None:
                self._off[culprit.key] = culprit.reason
            self._responding = False
            self._on_death()
            self._report_gauges()

    def _report_gauges(self) -> None:
        """Report what outlives it for its models, unless it reports itself. The caller holds the lock."""
        if not self._responding:
            families = self._gauges.after_death(self._known())
            self._counts(Message({"metrics": families, "complete": True, "statistics": []}))

    def _forget(self, model: str, versions: Collection[int], done: Future[Body]) -> None:
        if done.exception() is None:
            self._receive_counts(Message(done.result()))  # without that model
        self._on_forget(model, versions)


def _measure(peer: Peer, key: Key, plan: Plan) -> None:
    """Have the process measure the version that was loaded by this plan. Samples name it by its digest."""
    desired = DesiredModel(key[0], (plan.without_labels(),)).to_json()
    peer.tell("measure", {"desired": desired, "plan": plan.digest})


def _key(body: Mapping[str, Any]) -> Key:
    return body["model"], int(body["version"])
