"""Sends samples of live requests to the process with the references: from the side that chose them.

A message describes them, and their tensors are in a file. Several samples share it. It is anonymous memory and sealed,
so the receiver reads exactly what was written.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from bf16kit.messages.errors import Unavailable
from bf16kit.numerics.tensors import BY_NAME, Array
from service.drift.sampler import OnOutcome, Outcome, Sample
from service.models.plan import Plan
from service.peers.channel import Body
from service.wire.tensors import decode_raw, encode_raw

_log = logging.getLogger(__name__)
GATHER_S = 0.05  # time that samples wait, to be sent together
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
# Fields of a sample that are sent unchanged.
_PLAIN = ("rows", "nbytes", "probability", "precision", "profile", "client")
Ask = Callable[[str, Mapping[str, object], list[int]], Future[Body]]


class PlanSampleSender:
    """A :class:`service.drift.forwarder.SampleSender` for one model, loaded by ``plan``.

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
        """See :meth:`service.drift.forwarder.SampleSender.send`."""
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
        """See :meth:`service.drift.forwarder.SampleSender.finish`."""
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
    """Return the samples, in memory of their own. Raises ValueError if the file differs from its description."""
    samples: Sequence[Mapping[str, Any]] = description["samples"]
    size = sum(nbytes for sample in samples for *_, nbytes in sample["tensors"])
    if os.fstat(file).st_size != size:
        raise ValueError(f"samples of {os.fstat(file).st_size} bytes are described as {size}")
    at = 0
    unpacked = []
    for sample in samples:
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
