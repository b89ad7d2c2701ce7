"""Samples of live requests on their way to the process with the references.

A message describes them, and their tensors are in a file. Several samples share it. It is anonymous memory and sealed,
so the receiver reads exactly what was written.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bf16kit.messages.errors import Unavailable
from bf16kit.numerics.tensors import BY_NAME, Array
from bf16kit.service.drift.sampler import QUEUE_SIZE, OnOutcome, Outcome, Sample
from bf16kit.service.models.plan import Plan
from bf16kit.service.peers.channel import Body
from bf16kit.service.peers.peer import Peer
from bf16kit.service.wire.tensors import decode_raw, encode_raw

_log = logging.getLogger(__name__)
GATHER_S = 0.05  # time that samples wait, to be sent together
_MAX_BYTES = 256 << 20  # of samples sent to the process and not yet measured
_MAX_SAMPLES = 2 * QUEUE_SIZE  # per model; the process drops samples beyond its queue, but only while it runs
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
# Fields of a sample that are sent unchanged.
_PLAIN = ("rows", "nbytes", "probability", "precision", "profile", "client")
Key = tuple[str, int]  # a model's name and version
Ask = Callable[[str, Mapping[str, object], list[int]], Future[Body]]


class PlanSampleSender:
    """A :class:`bf16kit.service.drift.sampler.SampleSender` for one model, loaded by ``plan``.

    ``ask`` sends a request to the leading process. ``on_finish`` is called when no more samples will come, with the
    model's name and the plan's digest. Samples are sent together a moment later, from a separate thread. The
    thread that answers a request therefore waits neither for system calls nor for Python's lock after each
    (docs/decisions/0055).
    """

    def __init__(
        self, name: str, plan: Plan, ask: Ask, on_finish: Callable[[str, str], None] = lambda name, plan: None
    ) -> None:
        self._name = name
        self._plan = plan
        self._ask = ask
        self._on_finish = on_finish
        self._logged = False
        self._lock = threading.Lock()  # guards what waits
        self._waiting: list[tuple[Sample, OnOutcome]] = []
        self._ended = threading.Event()
        self._thread = ThreadPoolExecutor(1, f"{name}-samples")

    def send(self, sample: Sample, on_outcome: OnOutcome) -> None:
        """See :meth:`bf16kit.service.drift.sampler.SampleSender.send`."""
        with self._lock:
            if not (ended := self._ended.is_set()):
                self._waiting.append((sample, on_outcome))
            first = len(self._waiting) == 1  # those that follow within a moment are sent with it
        if ended:
            on_outcome("dropped")
        elif first:
            try:
                self._thread.submit(self._send_waiting)
            except RuntimeError as error:  # no thread is left, or finish() was called; the client gets its response
                if not self._ended.is_set():
                    self._log_first(error)
                self._drop_waiting()

    def finish(self) -> None:
        """See :meth:`bf16kit.service.drift.sampler.SampleSender.finish`."""
        with self._lock:
            self._ended.set()
        self._drop_waiting()
        self._thread.shutdown()  # samples sent after on_finish() would have the model measured again
        self._on_finish(self._name, self._plan.digest)

    def _take(self) -> list[tuple[Sample, OnOutcome]]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting

    def _drop_waiting(self) -> None:
        for _, on_outcome in self._take():
            on_outcome("dropped")

    def _send_waiting(self) -> None:
        """Send what waits, on the thread. Samples that cannot be sent count as failed."""
        self._ended.wait(GATHER_S)
        items = self._take()
        if not items:
            return
        pending = [on_outcome for _, on_outcome in items]  # without arrays, which can be freed
        try:
            model = {"model": self._name, "version": self._plan.version, "plan": self._plan.digest}
            body, file = pack([sample for sample, _ in items])
            try:
                response = self._ask("samples", {**body, **model}, [file])
            finally:
                os.close(file)
            response.add_done_callback(lambda done: _on_response(pending, done))
        except Exception as error:  # noqa: BLE001 -- for want of files or memory: the next are handed on
            self._log_first(error)
            _report(pending, ["failed"] * len(pending))

    def _log_first(self, error: Exception) -> None:
        """Log the first failure only: every affected sample is counted."""
        if not self._logged:
            self._logged = True
            _log.warning("model %r: samples for live drift cannot be handed on: %r", self._name, error)


def _on_response(pending: Sequence[OnOutcome], done: Future[Body]) -> None:
    error = done.exception()
    if error is None:
        _report(pending, done.result()["outcomes"])
    else:  # the process died with the samples or had no file left for them; it is logged there
        _report(pending, ["failed" if isinstance(error, (Unavailable, OSError)) else "dropped"] * len(pending))


def _report(pending: Sequence[OnOutcome], outcomes: Sequence[Outcome]) -> None:
    for on_outcome, outcome in zip(pending, outcomes, strict=True):
        on_outcome(outcome)


def key_of(fields: Mapping[str, Any]) -> Key:
    """Return the key of the version that a message is about."""
    return fields["model"], int(fields["version"])


def rejected(body: Body, outcome: Outcome) -> Future[Body]:
    """Return the outcomes of samples that are not sent."""
    outcomes: Future[Body] = Future()
    outcomes.set_result({"outcomes": [outcome] * len(body["samples"])})
    return outcomes


class _Waiting(NamedTuple):
    """Samples that came before the process had started, which takes a second or two. The file is a duplicate."""

    body: Body
    file: int
    outcomes: Future[Body]


class InFlight:
    """The samples that were sent to the process, or wait for its start, and have no outcome yet.

    ``lock`` guards it. ``on_error`` is called with the error of samples that were sent and got no outcome.
    """

    def __init__(self, lock: threading.RLock, on_error: Callable[[Key, BaseException], None]) -> None:
        self._lock = lock
        self._on_error = on_error
        self._bytes = 0
        self._samples: Counter[Key] = Counter()
        self._waiting: list[_Waiting] = []

    def add(self, body: Body, file: int, peer: Peer | None) -> Future[Body]:
        """Send samples, or keep them until the process starts; those without room are dropped.

        Returns the outcomes. The caller holds the lock.
        """
        if self._bytes + int(body["nbytes"]) > _MAX_BYTES or self._samples[key_of(body)] >= _MAX_SAMPLES:
            return rejected(body, "dropped")
        outcomes: Future[Body] = Future()
        if peer is None:
            self._waiting.append(_Waiting(body, os.dup(file), outcomes))
        self._bytes += int(body["nbytes"])
        self._samples[key_of(body)] += len(body["samples"])
        if peer is not None:
            self._send(peer, body, file, outcomes)
        return outcomes

    def send_waiting(self, peer: Peer) -> None:
        """Send what waits. The caller holds the lock."""
        for each in self.take_waiting():
            self._send(peer, each.body, each.file, each.outcomes)
            os.close(each.file)

    def take_waiting(self, is_gone: Callable[[Key, str], bool] = lambda key, digest: True) -> list[_Waiting]:
        """Return, and keep no longer, what waits of each version, loaded by the plan of this digest, that is gone."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            taken: list[_Waiting] = []
            for each in waiting:
                (taken if is_gone(key_of(each.body), each.body["plan"]) else self._waiting).append(each)
        return taken

    def end(self, waiting: Sequence[_Waiting], error: Unavailable | None = None) -> None:
        """Drop samples that were taken, or give them this error."""
        for each in waiting:
            os.close(each.file)
            self._release(each.body)
            if error is None:
                each.outcomes.set_result({"outcomes": ["dropped"] * len(each.body["samples"])})
            else:
                each.outcomes.set_exception(error)

    def _send(self, peer: Peer, body: Body, file: int, outcomes: Future[Body]) -> None:
        peer.ask("samples", body, [file]).add_done_callback(partial(self._complete, body, outcomes))

    def _complete(self, body: Body, outcomes: Future[Body], done: Future[Body]) -> None:
        self._release(body)
        error = done.exception()
        if error is None:
            outcomes.set_result(done.result())
        else:
            self._on_error(key_of(body), error)
            outcomes.set_exception(error)

    def _release(self, body: Body) -> None:
        with self._lock:
            self._bytes -= int(body["nbytes"])
            self._samples[key_of(body)] -= len(body["samples"])


def pack(samples: Sequence[Sample]) -> tuple[Body, int]:
    """Return the samples' description and the descriptor of their file, which the caller closes."""
    descriptions: list[Body] = []
    raws: list[bytes] = []
    for sample in samples:
        parts = [*_raw("feeds", sample.feeds), *_raw("outputs", sample.outputs)]
        plain = {name: getattr(sample, name) for name in _PLAIN}
        descriptions.append(plain | {"tensors": [tensor for tensor, _ in parts]})
        raws += [raw for _, raw in parts]
    file = os.memfd_create("bf16kit-samples", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(file, "wb", closefd=False) as written:
            written.writelines(raws)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(file)
        raise
    return {"samples": descriptions, "nbytes": sum(sample.nbytes for sample in samples)}, file


def unpack(description: Mapping[str, Any], file: int) -> list[Sample]:
    """Return the samples, in memory of their own."""
    at = 0
    unpacked = []
    for sample in description["samples"]:
        found: dict[str, dict[str, Array]] = {"feeds": {}, "outputs": {}}
        for kind, name, dtype, shape, nbytes in sample["tensors"]:
            raw = os.pread(file, nbytes, at)
            found[kind][name] = np.array(decode_raw(name, BY_NAME[dtype], tuple(shape), raw))
            at += nbytes
        unpacked.append(Sample(found["feeds"], found["outputs"], **{name: sample[name] for name in _PLAIN}))
    return unpacked


def _raw(kind: str, arrays: Mapping[str, Array]) -> list[tuple[list[Any], bytes]]:
    parts = []
    for name, array in arrays.items():
        dtype = BY_NAME["string" if array.dtype == np.object_ else array.dtype.name]
        raw = encode_raw(dtype, array)
        parts.append(([kind, name, dtype.name, list(array.shape), len(raw)], raw))
    return parts
