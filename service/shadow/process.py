"""Leads the process with the fp32 references, for a server of one process or a supervisor.

The process starts when it is first needed and is kept running from then on, unless it dies again and again. Nothing
here depends on workers.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future

from bf16kit.messages.errors import NotFound, Unavailable
from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.drift.contract import DriftVerdict
from bf16kit.service.models.plan import DesiredModel, Plan
from bf16kit.service.peers.channel import Body, from_json
from bf16kit.service.peers.child import Child
from bf16kit.service.peers.peer import ENDED, Handler, Message, Peer
from bf16kit.service.shadow.samples import InFlight, Key, key_of, rejected
from bf16kit.service.telemetry.values import Values, from_message, to_message

_log = logging.getLogger(__name__)
REFERENCES = "bf16kit.service.shadow.references"
NAME = "the shadow"
# Longest time without an answer. A measuring thread may hold Python's lock without a turn on a processor for a while;
# nobody waits for the process meanwhile.
SILENT_SECONDS = 120.0
EVIDENCE_SECONDS = 10.0  # longest wait for evidence
# So many deaths in so many seconds, and the shadow stays off: what kills it is loaded and run again after each.
DEATHS, DEATH_SECONDS = 3, 600.0
_UP, _LAST_SAMPLE = "drift_reference_up", "drift_last_sample_timestamp_seconds"
#: Returns the plan of this digest by which a model's version is to be served; None if there is none.
FindPlan = Callable[[str, int, str], Plan | None]


class ShadowProcess:
    """Runs the process from the first sample on, for as long as the leading thread calls :meth:`maintain`.

    ``counts`` receives its counts, ``on_death`` its death, and ``verdicts`` the verdicts on models' recent drift.
    ``on_forget`` is called when some of a model's versions will not be counted any more. These callbacks run on threads
    that must not block. With ``find_plan`` several processes choose samples. It knows the plans that they serve: a
    sample may arrive after its model was unloaded everywhere else. ``module`` is what the process runs.
    """

    def __init__(
        self,
        config: ServerConfig,
        counts: Handler,
        on_death: Callable[[], None],
        verdicts: Callable[[DriftVerdict], None] = lambda verdict: None,
        *,
        on_forget: Callable[[str, Collection[int]], None] = lambda model, versions: None,
        find_plan: FindPlan | None = None,
        clock: Callable[[], float] = time.monotonic,
        module: str = REFERENCES,
    ) -> None:
        self._config = config
        self._counts = counts
        self._on_death = on_death
        self._on_forget = on_forget
        self._find_plan: FindPlan = find_plan or (lambda model, version, digest: None)
        self._clock = clock
        self._lock = threading.RLock()  # reporting a sample's outcome may call back into this class
        self._in_flight = InFlight(self._lock, lambda key, error: self._note_unanswered(key, "running", error))
        self._counts_request: Future[Body] = Future()  # the last request for its counts
        self._counts_request.set_result({})
        self._responding = False  # it has answered since it started, which takes a second or two
        self._started: Peer | None = None  # the peer to which the start has been sent, which must come first
        self._plans: dict[Key, Plan] = {}  # of the versions that it measures
        self._last_samples: Values = {}  # the time of each model's last sample
        self._unanswered: set[str] = set()  # what the process was doing when it died
        self._deaths: deque[tuple[float, set[str]]] = deque(maxlen=DEATHS)  # when, and doing what
        self._off = ""  # why it stays off
        handlers: dict[str, Handler] = {"verdict": lambda message: verdicts(from_json(DriftVerdict, message.body))}
        self._child = Child(
            NAME,
            module,
            handlers,
            self._start,
            self._handle_death,
            silent_seconds=SILENT_SECONDS,
            clock=clock,
            expendable=True,
        )

    @property
    def peer(self) -> Peer | None:
        started = self._started
        return started if started is self._child.peer else None

    @property
    def pid(self) -> int | None:
        """The id of the process, until its death was handled; None while none runs."""
        return self._child.pid

    def ask_counts(self) -> Future[Body] | None:
        """Ask for its current counts; None if it does not run or has not answered yet, also since the last request."""
        if (peer := self.peer) is None or not self._responding or not self._counts_request.done():
            return None
        self._counts_request = peer.ask("counts")
        self._counts_request.add_done_callback(self._note_last_sample)
        return self._counts_request

    def off_reason(self, model: str, version: int) -> str:
        """Return why a version's drift is no longer measured, for users; "" if it is, or was never to be."""
        return self._off if (model, version) in self._plans else ""

    def maintain(self) -> None:
        if self._plans or self._child.pid is not None:
            self._child.maintain()

    def close(self) -> None:
        """End the process at once. Samples being measured are lost."""
        self._child.retire()
        self._child.kill()
        self._child.wait(0.0)
        self._in_flight.end(self._in_flight.take_waiting(), Unavailable(f"{NAME} of this server has ended", ENDED))

    def forward(self, message: Message) -> Future[Body]:
        """Forward another process' samples to the process with the references.

        The future gives their outcomes, or fails with Unavailable if the process dies with them. Raises OSError, or
        fails with it, if no file descriptor is left.
        """
        body = {**message.body, "shared": True}  # the policy's rate applies to those of all processes together
        return self._forward(body, message.files[0], lambda: self._find_plan(*key_of(body), body["plan"]))

    def ask(self, plan: Plan, kind: str, body: Mapping[str, object], files: list[int]) -> Future[Body]:
        """Forward samples of the version loaded by ``plan`` in this process, as :meth:`forward` does."""
        return self._forward({**body, "shared": False}, files[0], lambda: plan)

    def _forward(self, body: Body, file: int, find_plan: Callable[[], Plan | None]) -> Future[Body]:
        key = key_of(body)
        with self._lock:  # held until the samples are sent, so that "forget" for the model follows them
            plan, known = find_plan(), self._plans.get(key)
            if plan is None:  # they were in flight while their model was unloaded
                return rejected(body, "dropped")
            if known is None or known.digest != plan.digest:
                self._plans[key] = plan
                if (peer := self.peer) is not None:
                    self._measure(peer, key, plan)
            outcomes = rejected(body, "failed") if self._off else self._in_flight.add(body, file, self.peer)
            if known is None:
                self._report_gauges()
        return outcomes

    def forget(self, model: str, digest: str = "") -> None:
        """Drop the references of a model that was reloaded or unloaded.

        With ``digest``, only the version loaded by this plan; else all versions that are not wanted as they were.
        """

        def is_gone(key: Key, known: str) -> bool:
            return key[0] == model and (known == digest if digest else self._find_plan(*key, known) is None)

        with self._lock:
            gone = [key for key, known in self._plans.items() if is_gone(key, known.digest)]
            for key in gone:
                del self._plans[key]
            peer = self.peer
            request = peer.ask("forget", {"keys": gone}) if peer is not None and gone else None
            dropped = self._in_flight.take_waiting(is_gone)
        self._in_flight.end(dropped)
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
        """Return the evidence of the model's newest breach, as the bytes of a file.

        It comes in anonymous memory, never in a message. Raises NotFound if there is none, and Unavailable if the
        process does not answer.
        """
        if (peer := self.peer) is None:
            raise NotFound(no_evidence(model, version))
        file = os.memfd_create("bf16kit-evidence", os.MFD_CLOEXEC)
        try:
            answer = peer.ask("evidence", {"model": model, "version": version}, [file]).result(EVIDENCE_SECONDS)
            return os.pread(file, int(answer["bytes"]), 0)
        except TimeoutError:
            raise Unavailable(
                f"{NAME} of this server did not answer within {EVIDENCE_SECONDS:g} s; try again"
            ) from None
        finally:
            os.close(file)

    # --- the process --------------------------------------------------------------------------------------------------

    def _start(self, peer: Peer) -> None:
        peer.tell("start", self._config.model_dump(mode="json", include={"log_level", "log_format", "evidence"}))
        with self._lock:
            self._unanswered = set()
            for key, plan in self._plans.items():
                self._measure(peer, key, plan)
            peer.ask("counts").add_done_callback(self._receive_counts)  # with a series of each of them
            self._in_flight.send_waiting(peer)  # a concurrent "forget" for a model follows them
            self._started = peer

    def _measure(self, peer: Peer, key: Key, plan: Plan) -> None:
        """Have the process measure the version loaded by this plan, whose digest samples name.

        It answers once the reference is loaded or cannot be.
        """
        desired = DesiredModel(key[0], (plan.without_labels(),)).to_json()
        request = peer.ask("measure", {"desired": desired, "plan": plan.digest})
        request.add_done_callback(lambda done: self._note_unanswered(key, "being loaded", done.exception()))

    def _note_unanswered(self, key: Key, doing: str, error: BaseException | None) -> None:
        if isinstance(error, Unavailable):
            with self._lock:
                self._unanswered.add(f"{label_of(key)} ({doing})")

    def _handle_death(self) -> None:
        """Handle its death: its counts and its list of models are kept, and it is started again, unless it stays off.

        All requests to it have failed before.
        """
        with self._lock:
            self._deaths.append((self._clock(), self._unanswered))
            self._unanswered = set()
            if len(self._deaths) == DEATHS and self._deaths[-1][0] - self._deaths[0][0] <= DEATH_SECONDS:
                self._turn_off()
            self._responding = False
            self._on_death()
            self._report_gauges()

    def _turn_off(self) -> None:
        each_time = set.intersection(*(doing for _, doing in self._deaths))
        self._off = (
            f"{NAME}, the process that measures drift, died {DEATHS} times within {DEATH_SECONDS / 60:g} minutes and"
            " stays off: no drift is measured. "
        )
        if found := ", ".join(sorted(each_time or self._deaths[-1][1])):
            self._off += (
                f"Its fp32 references at work {'each' if each_time else 'the last'} time: {found}."
                " Set shadow.rate: 0 for the model that ends it, and restart the server to try again"
            )
        else:
            self._off += (
                "No fp32 reference was at work the last time: see whether something kills it, or memory runs out;"
                " then restart the server"
            )
        _log.error("%s", self._off)
        self._child.retire()
        self._in_flight.end(self._in_flight.take_waiting(), Unavailable(f"{NAME} of this server stays off", ENDED))

    # --- its counts ---------------------------------------------------------------------------------------------------

    def _receive_counts(self, done: Future[Body]) -> None:
        self._note_last_sample(done)
        if done.exception() is None:
            with self._lock:  # _report_gauges() meanwhile would look like counters that restart
                self._responding = True
                self._counts(Message(done.result()))

    def _note_last_sample(self, done: Future[Body]) -> None:
        if done.exception() is None:
            found = from_message(done.result()["metrics"])  # a new process has those of its own samples only
            self._last_samples |= {key: at for key, at in found.items() if key[0] == _LAST_SAMPLE}

    def _report_gauges(self) -> None:
        """Report what outlives it for its models, unless it reports itself. The caller holds the lock."""
        if self._responding:
            return
        gauges: Values = {(_UP, name, str(version)): 0.0 for name, version in self._plans}
        gauges |= {key: at for key, at in self._last_samples.items() if (key[1], int(key[2])) in self._plans}
        self._counts(Message({"metrics": to_message(gauges)}))

    def _forget(self, model: str, versions: Collection[int], done: Future[Body]) -> None:
        self._receive_counts(done)  # without that model
        self._on_forget(model, versions)


def label_of(key: Key) -> str:
    """Return a version's name in the log."""
    return f"model {key[0]!r} version {key[1]}"


def no_evidence(model: str, version: int) -> str:
    """Return the error of a version without evidence."""
    return f"{label_of((model, version))}: no live sample has been measured, so there is no evidence"
